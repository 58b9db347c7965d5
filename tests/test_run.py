"""The runner on tiny projects, with real kernels; run_all.sh as far as it goes without making an environment."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import drehr_utils
from drehr_utils import run

ROOT = Path(__file__).parents[1]
PARAMETERS = 'profile = "open"'


def write_notebook(root: Path, name: str, *sources: str) -> Path:
    cells = [new_markdown_cell(f"# {name}"), new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), path)
    return path


def outputs(path: Path) -> str:
    nb = nbformat.read(path, as_version=4)
    return json.dumps([cell.outputs for cell in nb.cells if cell.cell_type == "code"])


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.setenv("DREHR_ROOT", str(root))
    # The notebooks' own backend, as for a reader; conftest's would leave no figures.
    monkeypatch.delenv("MPLBACKEND")
    return root


def log_cell(root: Path, name: str) -> str:
    return f"open({str(root / 'order')!r}, 'a').write({name!r} + ' ' + profile + '\\n')"


def test_runs_in_order_from_and_only(project, capsys):
    for name in ("02_last", "00_first", "01_middle"):
        write_notebook(project, name, log_cell(project, name))
    (project / "notebooks" / "draft.ipynb").write_text("not a notebook of the series")
    assert run.main(["--profile", "smoke", "--from", "1", "--jobs", "1"]) == 0
    assert run.main(["--profile", "smoke", "--only", "02,00", "--jobs", "1"]) == 0
    order = (project / "order").read_text().splitlines()
    assert order == ["01_middle smoke", "02_last smoke", "00_first smoke", "02_last smoke"]
    out = capsys.readouterr().out
    assert re.search(r"^\[1/2\] 01_middle \.\.\. \d+\.\d s\n\[2/2\] 02_last \.\.\. \d+\.\d s\ntotal \d+\.\d s\n", out)
    # Profiles other than open leave the notebooks alone; their copies say which profile made them.
    assert '"outputs": []' in (project / "notebooks" / "01_middle.ipynb").read_text()
    assert 'profile = \\"smoke\\"' in (project / "data/cache/smoke/notebooks/01_middle.ipynb").read_text()


def test_a_relative_path_is_the_same_in_the_notebooks_folder(project, monkeypatch):
    (project / "notes").mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("DREHR_NOTES", "notes")
    monkeypatch.setenv("DREHR_ENCODER", "a/model-of-a-hub")
    write_notebook(
        project, "00_a", "import os\nprint(os.path.isdir(os.environ['DREHR_NOTES']), os.environ['DREHR_ENCODER'])"
    )
    assert run.main(["--profile", "smoke"]) == 0
    assert "True a/model-of-a-hub" in outputs(project / "data/cache/smoke/notebooks/00_a.ipynb")


def test_second_run_in_place_gives_the_same_file(project, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(project / "jupyter"))
    foreign = project / "jupyter" / "kernels" / "python3" / "kernel.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text(json.dumps({"argv": ["false"], "display_name": "another python3", "language": "python"}))
    path = write_notebook(
        project,
        "00_a",
        "import os, sys, time, warnings\nfrom tqdm.auto import tqdm\n"
        "for _ in tqdm(range(3)):\n    time.sleep(0.05)\nprint('after the bar')",
        "print(sys.executable == os.environ['EXPECTED'], os.getcwd(), os.environ['DREHR_PROFILE'])\n"
        "print(os.environ['HF_HUB_OFFLINE'], os.environ['PYTHONHASHSEED'], hash('a') % 1000)\nwarnings.warn('careful')",
        "import drehr_utils\ndrehr_utils.__version__",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    )
    monkeypatch.setenv("EXPECTED", sys.executable)
    assert run.main([]) == 0
    first = path.read_bytes()
    assert run.main([]) == 0
    assert path.read_bytes() == first

    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    assert [cell.id for cell in nb.cells] == [f"cell-{i}" for i in range(6)]  # no injected cell left
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5]
    assert nb.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "drehr": {"cells": nb.metadata["drehr"]["cells"], "read": {}, "wrote": {}},
    }
    assert [cell.metadata for cell in code] == [{"tags": ["parameters"]}, {}, {}, {}, {}]
    assert code[1].outputs == [new_output("stream", name="stdout", text="after the bar\n")]
    stdout, stderr = code[2].outputs
    assert stdout.text.startswith("True ./notebooks open\n1 0 ")
    assert stderr.text.startswith("(cell):3: UserWarning: careful\n")
    assert code[3].outputs[0].data["text/plain"] == repr(drehr_utils.__version__)
    assert code[3].outputs[0].execution_count == 4
    assert "image/png" in code[4].outputs[0].data
    text = first.decode()
    for absolute in (str(project), str(Path.home()), sys.prefix):
        assert absolute not in text


def test_a_failing_notebook_stays_as_it_was(project, capsys):
    good = write_notebook(project, "00_good", "print('ran')")
    bad = write_notebook(project, "01_bad", "x = 1", f"\nvalues = dict(a=x)\nvalues[{str(project / 'b')!r}]")
    never = write_notebook(project, "02_never", "x = 1")
    before = bad.read_bytes(), never.read_bytes()
    assert run.main(["--jobs", "1"]) == 1
    assert (bad.read_bytes(), never.read_bytes()) == before
    assert "ran" in outputs(good)
    captured = capsys.readouterr()
    assert re.search(r"\[1/3\] 00_good \.\.\. [\d.]+ s\n\[2/3\] 01_bad \.\.\. failed after [\d.]+ s\n$", captured.out)
    assert captured.err.splitlines()[:3] == [
        "notebooks/01_bad.ipynb, cell 4 failed:",
        "  values = dict(a=x)",
        "KeyError: './b'",
    ]
    assert "data/cache/open/failed/01_bad.ipynb" in captured.err
    assert str(project) not in captured.err + captured.out
    assert "KeyError" in outputs(project / "data/cache/open/failed/01_bad.ipynb")
    # Once it is mended, the failed copy goes.
    write_notebook(project, "01_bad", "x = 1")
    assert run.main(["--only", "1"]) == 0
    assert not (project / "data/cache/open/failed/01_bad.ipynb").exists()
    assert sorted(path.name for path in bad.parent.iterdir()) == ["00_good.ipynb", "01_bad.ipynb", "02_never.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_reads_the_benchmark_that_06_makes_waits_for_it(project, jobs):
    mine = project / "mine.toml"
    mine.write_text('base = "open"\nbenchmark = "none"\n')
    for name in ("05_reads", "07_reads"):
        write_notebook(project, name, f"order = {str(project / 'order')!r}\nprint(open(order).read())")
    write_notebook(project, "06_makes", "import time\ntime.sleep(1)", f"open({str(project / 'order')!r}, 'w')")
    assert run.main(["--profile", str(mine), "--jobs", jobs]) == 0


@pytest.mark.slow
def test_two_lanes_run_two_notebooks_at_a_time_and_those_that_read_models_after_they_are_made(project, capfd):
    """00 and 05 wait for each other's file; 08 for 05, 15 for 08; 16 for all; 06 fails, so that 12 isn't begun."""
    meet = "open({own!r}, 'w')\nimport os, time\nwhile not os.path.exists({other!r}):\n    time.sleep(0.05)"
    files = {name: str(project / name) for name in ("00", "05")}
    write_notebook(project, "00_a", meet.format(own=files["00"], other=files["05"]), log_cell(project, "00"))
    threads = "import os\nprint(os.environ['OMP_NUM_THREADS'])"
    write_notebook(project, "05_t", meet.format(own=files["05"], other=files["00"]), threads, log_cell(project, "05"))
    write_notebook(project, "08_reads", "import time\ntime.sleep(1)", log_cell(project, "08"))
    write_notebook(project, "15_reads_8", log_cell(project, "15"))
    write_notebook(project, "16_gathers", log_cell(project, "16"))
    assert run.main(["--jobs", "2"]) == 0
    assert (project / "order").read_text().splitlines()[-3:] == ["08 open", "15 open", "16 open"]
    assert f'"{(os.cpu_count() or 1) // 2}\\n"' in outputs(project / "notebooks/05_t.ipynb")
    ended = re.findall(r"\[(\d)/5\] (\w+) \.\.\. [\d.]+ s\n", capfd.readouterr().out)
    assert [int(n) for n, _ in ended] == [1, 2, 3, 4, 5] and ended[-1][1] == "16_gathers"
    others = [name for _, name in ended if name != "00_a"]  # which nothing but 16 waits for: it may end late
    assert others == ["05_t", "08_reads", "15_reads_8", "16_gathers"]
    write_notebook(project, "06_bad", "1 / 0")
    write_notebook(project, "07_long", "import time\ntime.sleep(6)")
    never = write_notebook(project, "12_never", "x = 1")
    assert run.main(["--jobs", "2", "--only", "06,07,12"]) == 1
    printed = capfd.readouterr()
    assert "06_bad.ipynb, cell 3 failed:\n  1 / 0\nZeroDivisionError" in printed.err
    assert "07_long ... " in printed.out and "total" not in printed.out and outputs(never) == "[[], []]"


def test_a_dying_kernel_and_an_edit_during_the_run(project, capsys):
    dying = write_notebook(project, "00_dies", "import os", "os._exit(3)", "never = 1")
    assert run.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("notebooks/00_dies.ipynb, cell 4 failed:\n  os._exit(3)\nDeadKernelError: ")
    # An author who saves the notebook while it runs must not lose the edit.
    write_notebook(project, "00_dies", f"open({str(dying)!r}, 'a').write(' ')\nprint('done')")
    assert run.main([]) == 0
    assert outputs(dying) == "[[], []]"
    assert "done" in outputs(project / "data/cache/open/notebooks/00_dies.ipynb")
    assert "data/cache/open/notebooks/00_dies.ipynb" in capsys.readouterr().out


def test_mimic_never_shows_patient_text(project, capfd):
    secret = "Mr. Example has gout"
    path = write_notebook(
        project,
        "00_notes",
        f"import os\nsecret = ' '.join({secret.split()!r})\nprint(secret)\nos.system(f'echo {{secret}} >&2')",
        "raise ValueError(secret)",
    )
    before = path.read_bytes()
    assert run.main(["--profile", "mimic"]) == 1
    captured = capfd.readouterr()
    assert secret not in captured.out + captured.err
    assert "notebooks/00_notes.ipynb, cell 4 failed with ValueError:" in captured.err
    assert "data/cache/mimic/failed/00_notes.ipynb" in captured.err
    assert secret in outputs(project / "data/cache/mimic/failed/00_notes.ipynb")
    # Without encryption any local user may listen to a kernel; ipykernel says so when it starts.
    assert "encryption" not in (project / "data/cache/mimic/logs/00_notes.log").read_text()
    assert path.read_bytes() == before


def test_fresh_keeps_the_language_models_answers(project, capsys):
    write_notebook(project, "00_a", "x = 1")
    for profile in ("open", "mimic"):
        for name in ("llm/answers.jsonl", "chunks/a", "b"):
            path = project / "data/cache" / profile / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    with pytest.raises(SystemExit) as stop:
        run.main(["--profile", "mimic", "--fresh"])
    assert stop.value.code == 2 and "--yes" in capsys.readouterr().err
    assert (project / "data/cache/mimic/b").exists()
    assert run.main(["--fresh"]) == 0
    left = {
        path.relative_to(project / "data/cache/open").as_posix() for path in (project / "data/cache/open").rglob("*")
    }
    assert "llm/answers.jsonl" in left and not {"chunks", "b"} & left
    assert (project / "data/cache/mimic/b").exists()


def test_two_runs_at_once(project, capsys):
    """The second names the first and touches nothing; a run that was killed holds nobody up."""
    write_notebook(project, "00_a", f"open({str(project / 'began')!r}, 'w')\nimport time\ntime.sleep(60)")
    command = [sys.executable, "-m", "drehr_utils.run", "--profile", "smoke"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        while not (project / "began").exists() and first.poll() is None:
            time.sleep(0.1)
        assert run.main(["--profile", "smoke", "--fresh"]) == 1
        said = capsys.readouterr().err
        assert re.search(rf"Not started: process {first.pid} on .*, ./run_all.sh --profile smoke since .*; wait", said)
        assert (project / "data/cache/smoke/running").exists()
        first.kill()
    write_notebook(project, "00_a", "x = 1")
    assert run.main(["--profile", "smoke"]) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_takes_its_lanes_along(project, how):
    """Or they would go on writing results while the next run, which finds no lock, writes them too."""
    for name in ("00_a", "01_b"):
        write_notebook(project, name, f"open({str(project / name)!r}, 'w').write('x')\nimport time\ntime.sleep(60)")
    command = [sys.executable, "-m", "drehr_utils.run", "--profile", "smoke", "--jobs", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        while not all((project / name).exists() for name in ("00_a", "01_b")) and first.poll() is None:
            time.sleep(0.1)
        children = psutil.Process(first.pid).children(recursive=True)
        assert len(children) >= 4  # two lanes, two kernels
        first.send_signal(how)
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert first.returncode == (130 if how == signal.SIGINT else -how)


def test_a_lane_that_is_killed_is_said(project, capfd):
    write_notebook(project, "00_a", "import os, signal\nos.kill(int(os.environ['JPY_PARENT_PID']), signal.SIGKILL)")
    write_notebook(project, "01_b", "import time\ntime.sleep(2)")
    assert run.main(["--profile", "smoke", "--jobs", "2"]) == 1
    assert "notebooks/00_a.ipynb: a process was killed; is memory short? --jobs 1" in capfd.readouterr().err


def test_a_profile_of_ones_own(project):
    mine = project / "mine.toml"
    mine.write_text('base = "smoke"\nseed = 5\n')
    path = write_notebook(
        project, "00_a", "from drehr_utils.profiles import load_profile\nprint(load_profile(profile).seed)"
    )
    before = path.read_bytes()
    assert run.main(["--profile", str(mine)]) == 0
    assert '"5\\n"' in outputs(project / "data/cache/mine/notebooks/00_a.ipynb") and path.read_bytes() == before


def test_bad_arguments_say_what_exists(project, capsys):
    def message(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run.main(arguments)
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "no notebooks" in message()
    write_notebook(project, "00_a", "x = 1")
    write_notebook(project, "03_b", "x = 1")
    for arguments in (("--only", "00,07"), ("--from", "7")):
        assert "no notebook 07; there are:\n  00_a\n  03_b" in message(*arguments)
    for profile in run.PROFILES:
        assert profile in message("--profile", "none")
    assert "number" in message("--only", ",") and "number" in message("--from", "")


def test_collapse_is_what_a_terminal_shows():
    assert run.collapse("a\rb\nc") == "b\nc"
    assert run.collapse("abc\rX\n") == "Xbc\n"
    assert run.collapse("one\r\ntwo\r\n") == "one\ntwo\n"
    assert run.collapse("\r 0%|  |\r50%|# |\r        \rdone\n") == "done\n"
    assert run.collapse("plain  \n\x1b[31mred\x1b[0m\n\x1b[A") == "plain  \n\x1b[31mred\x1b[0m\n"


def test_progress_bars_go_and_messages_stay():
    def stream(name: str, text: str):
        return new_output("stream", name=name, text=text)

    bars = [
        stream("stderr", "\rnotes:   0%|          | 0/9 [00:00<?, ?note/s]"),
        stream("stdout", "1\n"),
        stream("stderr", "\rnotes: 100%|##########| 9/9 [00:01<00:00,  6.9note/s]\n\r3it [00:00, 21.55it/s]\n"),
        stream("stdout", "2\n"),
        stream("stderr", "Waiting for process 28668 on vm, making a.npy since 21:23, 22 November ...\n"),
    ]
    warning = stream("stderr", "a warning of 100% [sic]\n")
    shown = new_output("display_data", data={"text/plain": "x"})
    nb = new_notebook(cells=[new_code_cell("x", outputs=[*bars, warning, shown, stream("stdout", "3"), shown])])
    run.clean_notebook(nb, Path("/project"))
    assert nb.cells[0].outputs == [stream("stdout", "1\n2\n"), warning, shown, stream("stdout", "3"), shown]


def test_paths_are_shortened_only_where_they_are_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    shorten = run.path_shortener(Path("/home/ann/drehr"))
    assert shorten("in /home/ann/drehr/data and /home/ann/drehr.") == "in ./data and .."
    assert shorten("/home/ann/drehr2/x /mnt/home/ann/x /home/anna") == "~/drehr2/x /mnt/home/ann/x /home/anna"
    assert shorten(f"{sys.prefix}/lib/a.py:3") == "(env)/lib/a.py:3"
    monkeypatch.setenv("HOME", "/")
    assert run.path_shortener(Path("/p"))("/usr/bin /p/a") == "/usr/bin ./a"


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs bash in a folder that is not the project's, with nothing on PATH but the system's own tools."""
    env = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], **environment}
    return subprocess.run(["bash", *arguments], capture_output=True, text=True, env=env, cwd="/", check=False)


@pytest.fixture
def bare(tmp_path) -> Path:
    """A copy of the scripts, and a folder `bin` with the system's tools but neither Python nor conda."""
    for name in ("run_all.sh", "requirements.lock", "pyproject.toml", "environment.yml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "cat", "cksum", "cp", "dirname", "grep", "mkdir", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def test_run_all_without_python_says_what_it_needs(bare):
    done = shell(str(bare / "run_all.sh"), PATH=str(bare / "bin"))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, found none." in done.stderr


def test_run_all_makes_and_renews_a_conda_environment(bare):
    # Conda cannot be had from a package index; this stands in for the five commands that run_all.sh gives it.
    conda = bare / "bin" / "conda"
    conda.write_text(f"""#!/bin/bash
cd {bare}
case "$1 $2 $3" in
  "env list "*) if [[ -d env ]]; then echo "drehr    $PWD/env"; fi ;;
  "env create "* | "env update "*)
    echo "$*" >>calls
    mkdir -p env/bin
    [[ ! -e broken ]] || exit 1
    cp python env/bin/python ;;
  "run -n base") echo /bin/false ;;
  "run -n drehr") [[ -e env/bin/python ]] && echo "$PWD/env/bin/python" ;;
esac
""")
    conda.chmod(0o755)
    (bare / "python").write_text("#!/bin/bash\necho ran $@\n")
    (bare / "python").chmod(0o755)

    def start() -> tuple[str, list[str]]:
        done = shell(str(bare / "run_all.sh"), "--only", "00", PATH=str(bare / "bin"))
        calls = (bare / "calls").read_text().splitlines()
        (bare / "calls").write_text("")
        return done.stdout.strip() or f"failed with {done.returncode}", calls

    create, update = (f"env {verb} -n drehr -f environment.yml" for verb in ("create", "update"))
    ran = "ran -m drehr_utils.run --only 00"
    (bare / "broken").touch()
    assert start() == ("failed with 1", [create])  # leaves half an environment
    (bare / "broken").unlink()
    assert start() == (ran, [update])
    assert start() == (ran, [])
    with open(bare / "requirements.lock", "a") as lock:
        lock.write("# changed\n")
    (bare / "broken").touch()
    assert start() == ("failed with 1", [update])
    (bare / "broken").unlink()
    assert start() == (ran, [update])
    assert start() == (ran, [])


def test_run_all_help_needs_no_environment():
    for script in ("run_all.sh", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)
        assert shell("-n", str(ROOT / script)).returncode == 0
    done = shell(str(ROOT / "run_all.sh"), "--profile", "smoke", "--help")
    assert done.returncode == 0 and not done.stderr
    own = subprocess.run([sys.executable, "-m", "drehr_utils.run", "-h"], capture_output=True, text=True, cwd=ROOT)
    options = set(re.findall(r"--[a-z]+", own.stdout))
    assert options == {"--profile", "--from", "--only", "--jobs", "--check", "--public", "--fresh", "--yes", "--help"}
    assert options <= set(re.findall(r"--[a-z]+", done.stdout))
    assert all(profile in text for profile in run.PROFILES for text in (own.stdout, done.stdout))


def test_run_all_uses_the_given_python(project):
    write_notebook(project, "00_a", "x = 1")
    given = {"DREHR_PYTHON": sys.executable, "DREHR_ROOT": str(project)}
    assert shell(str(ROOT / "run_all.sh"), "--only", "5", **given).returncode == 2
    done = shell(str(ROOT / "run_all.sh"), "test", "--version", **given)
    assert done.returncode == 0 and done.stdout.startswith("pytest ")


def test_the_lock_covers_the_direct_dependencies():
    def name(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()

    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version == "3\.12")?', line) for line in lines)
    direct = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert {name(requirement) for requirement in direct} <= {name(line) for line in lines}
    assert not [line for line in lines if re.match(r"nvidia|triton|cuda", line)]

"""Canary words in a protected corpus, and where else they are found.

A run of the miniature of profile `mimic` (mimic4_miniature) has a checkout that is a git repository, a home and a
temporary folder of its own, so that all it leaves behind can be searched: `Place.leaks` names each leak."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
from mimic4_miniature import write_miniature
from nbformat.v4 import new_code_cell, new_notebook
from test_mimic import PROFILE, SHARED, answer
from tiny_bert import tiny_bert

from drehr_utils.profiles import ROOT

# What a careless cell does with a note; all of it must stay in the profile's folder.
CARELESS = """
import logging, os, sys, warnings
import matplotlib.pyplot as plt
from drehr_utils import pipeline
from drehr_utils.evaluation import plots
from drehr_utils.profiles import load_profile
profile = load_profile(profile)
text = pipeline.notes(profile)[0][0].text
print(text)
warnings.warn(text)
logging.getLogger("drehr_utils").error(text)
os.write(2, text.encode())
figure, axes = plt.subplots()
axes.set_title(text[:100])
plots.save_figure(figure, "fig_careless", profile.figures)
raise ValueError(text)
"""
NAME = "canaries"  # of the profile
EVERY = 40  # words of a note between two canaries: each chunk of 100 has at least two
_KERNED = re.compile(rb"\)\s*-?[\d.]+\s*\(")  # between two letters of a word in a PDF
_PACKED = re.compile(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]")


def contents(path: Path) -> Iterator[bytes]:
    """A file's name, its bytes and what is packed in it: gzip's members, a zip's files (.npz), Parquet's columns, PDF's
    streams, a PNG's text, git's objects. A picture's letters nobody reads here."""
    data = path.read_bytes()
    yield path.name.encode("utf-8", "surrogateescape")
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    if data[:4] == data[-4:] == b"PAR1":
        yield from (repr(column.to_pylist()).encode() for column in pq.read_table(path).columns)
    for start in (match.start() for match in _PACKED.finditer(data)):
        unpack, parts = zlib.decompressobj(31 if data[start] == 0x1F else 15), []
        with contextlib.suppress(zlib.error):
            for at in range(start, len(data), 1 << 14):  # whole, it would be copied for each start there seems to be
                parts.append(unpack.decompress(data[at : at + (1 << 14)]))
                if unpack.eof:
                    break
        yield b"".join(parts)


@dataclass
class Searched:
    files: int = 0
    bytes: int = 0


@dataclass
class Place:
    """`word` begins a canary in each chunk and order, `number` each patient's and admission's id. The profile's cache,
    the joined release and an index may hold them, if they are for their owner alone and git ignores them."""

    root: Path
    word: str
    number: str
    searched: Searched = field(default_factory=Searched)
    trace: bool = False  # by strace as well, which sees what no Python makes

    def __post_init__(self) -> None:
        self.checkout, self.home, self.index = self.root / "checkout", self.root / "home", self.root / "index"
        self.cache = self.checkout / "data/cache" / NAME
        self.release = self.checkout / "data/cache/cliniq_release"
        self.toml = self.root / f"{NAME}.toml"

    def plant(self, text: str) -> str:
        words = text.split(" ")
        for at in range(0, len(words), EVERY):
            words[at] += f" {self.word}{zlib.crc32(text.encode()) % 10000:04d}"
        return " ".join(words)

    def reply(self, prompt: str, body: dict) -> str:
        """test_mimic's answers, which quote the note's canaries as terms as well."""
        said, found = answer(prompt, body), re.findall(rf"{self.word}\d*", prompt)
        return f"{said}\n- {found[0]}\n- {found[0]} fever" if found and said.startswith("- ") else said

    def hostile(self, prompt: str, body: dict):
        """Quotes the note in an error, in one that says it is none, in where it sends the client, or as the answer."""
        quoted, kind = prompt[-2000:], zlib.crc32(prompt.encode()) % 4
        if kind == 3:
            return quoted
        status, headers = ((400, {}), (200, {}), (307, {"location": f"http://192.0.2.1/{self.word}"}))[kind]
        return lambda handler: _error(handler, status, quoted, headers)

    def _start(self, *arguments: str, fault: str = "", base_url: str = "") -> subprocess.Popen:
        """`python -m arguments` with its output in one pipe; `fault`: see canary_site/sitecustomize.py."""
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.root / "tmp"), "LANG": "C.UTF-8",
            "PYTHONPATH": f"{self.checkout}:{ROOT / 'tests/canary_site'}", "DREHR_ROOT": str(self.checkout),
            "OMP_NUM_THREADS": "1", "DREHR_PUBLIC_DATA": str(self.root / "none"), "MPLBACKEND": "agg",
            "DREHR_LLM_BASE_URL": base_url, "DREHR_LLM_MODEL": "m", "HF_HUB_OFFLINE": "1",
            "CANARY_PLACE": str(self.root), "CANARY_FAULT": fault,
            "CANARY_SAID": f"can't read '{self.word}0000 fever' of {self.number}1",
        }  # fmt: skip
        command = [sys.executable, "-m", *arguments]
        if self.trace:
            calls = "trace=connect,sendto,sendmsg,sendmmsg"
            command = ["strace", "-f", "--seccomp-bpf", "-qq", "-A", "-e", calls, "-o", f"{self.root}/calls", *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.checkout, env=environment, **pipes)

    def run(self, *arguments: str, **given: str) -> tuple[int, str]:
        """The exit status and what was printed, once the last of the run's processes is gone: a killed run's kernels
        live on for a second or two. No deadline, for a busy machine would reach it."""
        run = self._start(*arguments, **given)
        printed = run.communicate()[0].decode("utf-8", "replace")
        while self._processes():
            time.sleep(0.2)
        return run.returncode, printed

    def notebook(self, numbers: str, **given: str) -> tuple[int, str]:
        return self.run("drehr_utils.run", "--profile", str(self.toml), "--only", numbers, **given)

    def _processes(self) -> list[int]:
        mark, found = f"CANARY_PLACE={self.root}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def holds(self, path: Path) -> bool:
        """In any case, in UTF-8, UTF-16 or UTF-32 (numpy's), or as a PDF's text."""
        canaries = (self.word, self.number)
        forms = [word.encode(encoding) for word in canaries for encoding in ("ascii", "utf-16-le", "utf-32-le")]
        for part in contents(path):
            self.searched.bytes += len(part)
            if path.suffix == ".pdf":  # TrueType's letters have two bytes
                part = _KERNED.sub(b"", part.replace(b"\0", b""))
            part = part.lower()
            if any(form in part for form in forms):
                return True
        return False

    def holding(self, folder: Path, but: Sequence[Path] = ()) -> list[str]:
        """The files under `folder`, those under `but` aside, that hold a canary."""
        found = []
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and not any(map(path.is_relative_to, but)):
                self.searched.files += 1
                if self.holds(path):
                    found.append(path.relative_to(self.root).as_posix())
        return found

    def leaks(self, printed: str = "") -> list[str]:
        """All that a run left where no canary may be; `printed` is what the terminal showed."""
        allowed = [path for path in (self.cache, self.release, self.index) if path.exists()]
        found = [f"{path} in a shared place" for path in self.holding(self.root, [*allowed, self.root / "mimic"])]
        for path in allowed:
            if path.stat().st_mode & 0o077:
                found.append(f"{path.name}/ is open to other users")
        # What one shows or passes on: no text of a note, though it lies in the protected folder.
        cards = [
            *self.cache.glob("figures"),
            *self.cache.glob("models/*/README.md"),
            *self.cache.glob("models/*/*.json"),
        ]
        for path in cards:
            held = self.holding(path) if path.is_dir() else [path.name] if self.holds(path) else []
            found += [f"{held_path} holds a canary" for held_path in held if "careless" not in held_path]
        if shown := re.search(f"{self.word}|{self.number}", printed, re.IGNORECASE):
            found.append(f"the terminal: ...{printed[max(0, shown.start() - 200) : shown.end() + 40]}")
        if changed := self.git("status", "--porcelain"):
            found.append(f"git sees {changed}")
        audit = self.root / "audit"
        said = audit.read_text().splitlines() if audit.exists() else []
        found += sorted({line for line in said if not line.startswith("fired")})
        if (calls := self.root / "calls").exists():
            hosts = re.findall(r'(?:inet_addr\(|inet_pton\(AF_INET6, )"([^"]+)"', calls.read_text(errors="replace"))
            found += [f"a system call to {host}" for host in sorted(set(hosts)) if not host.startswith(("127.", "::1"))]
        return found

    def fired(self) -> list[str]:
        """The faults that happened, in order: kind and the file's place."""
        audit = self.root / "audit"
        lines = audit.read_text().splitlines() if audit.exists() else []
        return [line.removeprefix("fired ") for line in lines if line.startswith("fired")]

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments]
        return subprocess.run(command, cwd=self.checkout, capture_output=True, text=True, check=True).stdout


def _error(handler: BaseHTTPRequestHandler, status: int, text: str, headers: dict[str, str]) -> None:
    data = json.dumps({"error": {"message": text}}).encode()
    handler.send_response(status, re.sub(r"[^ -~]", " ", text[-40:]))
    for name, value in {
        "content-length": str(len(data)),
        "x-echo": re.sub(r"[^ -~]", " ", text[:200]),
        **headers,
    }.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def plant(root: Path, seed: int | None = None) -> Place:
    """A place under `root`, made anew, whose canaries are of a word that no other run has."""
    draw = random.Random(seed)
    letters, digits = draw.choices("bcdfghjklmnpqrstvwxz", k=8), draw.choices("12345678", k=11)
    place = Place(root, "zq" + "".join(letters), "".join(digits))
    for folder in (place.home, root / "tmp", place.checkout / "data"):
        folder.mkdir(parents=True)
    for name in ("drehr_utils", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, place.checkout / name, ignore=ignored)
    shutil.copy(ROOT / ".gitignore", place.checkout)
    careless = [new_code_cell('profile = "open"', metadata={"tags": ["parameters"]}), new_code_cell(CARELESS)]
    nbformat.write(new_notebook(cells=careless), place.checkout / "notebooks/90_careless.ipynb")
    for name in SHARED:
        (place.checkout / name).symlink_to(ROOT / name)
    place.git("init", "-q")
    made = write_miniature(root / "mimic", plant=place.plant, mark=place.number)
    place.toml.write_text(PROFILE.format(made=made, cliniq=place.release, encoder=tiny_bert(root / "encoder")))
    place.git("add", "-A")
    place.git("commit", "-qm", "all")
    return place


def release_command(place: Place) -> tuple[str, ...]:
    """Joins the release with MIMIC-III."""
    given, made = place.root / "mimic", str(place.release)
    folders = ("--release", str(given / "CliniQ"), "--mimic", str(given / "mimiciii"), "--out", made)
    return ("drehr_utils.papers.cliniq.release", *folders, "--dev-share", "0.3")

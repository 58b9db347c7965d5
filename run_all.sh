#!/usr/bin/env bash
# Makes the environment when there is none, then runs the notebooks (or the tests). See usage below.
set -euo pipefail
if [[ ${DREHR_PYTHON:-} == */* && $DREHR_PYTHON != /* ]]; then DREHR_PYTHON=$PWD/$DREHR_PYTHON; fi
args=()
for arg in "$@"; do # a profile's file is named from where one stands
  if [[ $arg == *.toml && $arg != /* && -f $arg ]]; then arg=$PWD/$arg; fi
  if [[ $arg == --profile=*.toml && -f $PWD/${arg#*=} ]]; then arg=--profile=$PWD/${arg#*=}; fi
  args+=("$arg")
done
set -- ${args[@]+"${args[@]}"}
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

usage() {
  cat <<'USAGE'
Usage: ./run_all.sh [options]             run the notebooks, and show where each result went
       ./run_all.sh test [pytest args]    run the tests
       ./run_all.sh site                  make a site of the executed notebooks, the texts and the API in data/cache/site/html
                                          (its packages are installed first if need be)

Options:
  --profile NAME               open (default): the open data, on a laptop, notebooks executed in place
                               full: the same, trained long enough to judge by (half a day); smoke: a slice, in minutes;
                               mimic: MIMIC and licensed vocabularies, on GPUs (these three leave notebooks/ alone
                               and write to data/cache/<profile>/notebooks/);
                               or the path of a .toml file: a profile of your own, see CONTRIBUTING.md
  --from NN                    start at notebook NN, for example --from 05
  --only NN[,NN...]            run these notebooks only, for example --only 08 or --only 08,09
  --jobs N                     notebooks at a time, each with its share of the cores: 2 unless said otherwise (mimic: 1);
                               say 1 where there are less than 16 GB of memory
  --check                      run nothing; say what is missing and where it comes from, and what a run would take
  --public                     first fetch the public data sets that aren't ours to pass on, and print their licences
  --fresh                      first delete data/cache/<profile>, except a language model's answers in its folder llm
  --yes                        confirm --fresh under a protected profile
  -h, --help                   print this

The environment is made on the first run and again when requirements.lock or pyproject.toml changes: the conda environment
`drehr` if conda or mamba is on PATH, else .venv in this folder (needs Python 3.11 or newer). A run that was cut off is
finished by the next. To use an environment of your own that has the packages of requirements.lock instead:

  DREHR_PYTHON=/path/to/its/python ./run_all.sh
USAGE
}

die() { echo "run_all.sh: $*" >&2; exit 1; }

# The CPU build of torch is a tenth of the GPU build's size, but lives on an index of its own that not every network reaches.
# One short look decides, rather than pip's retries for each package. On macOS the ordinary build is the CPU build.
torch_index() { # python
  local url=https://download.pytorch.org/whl/cpu
  if [[ $(uname -s) == Linux ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    "$1" -c "import urllib.request as r; r.urlopen('$url/torch/', timeout=5)" 2>/dev/null && echo "$url"
  fi
  return 0
}

make_venv() { # pip and not uv: uv does not look at pip's configured wheel folders, where a CPU build of torch may lie
  local base="" index="" candidate dist
  if ! .venv/bin/python -c "$new_enough" 2>/dev/null; then
    for candidate in python3.11 python3.12 python3.13 python3 python; do # 3.11 first: the lock was made with it
      if "$candidate" -c "$new_enough" >/dev/null 2>&1; then base=$candidate && break; fi
    done
    [[ -n $base ]] || die "needs Python 3.11 or newer, found $( (python3 --version || echo none) 2>/dev/null)." \
      "Install it (or conda), or set DREHR_PYTHON (see --help)."
    "$base" -m venv --clear .venv || die "could not make .venv (on Debian and Ubuntu: apt install python3-venv)."
  fi
  # A package whose installation was cut off has no RECORD yet, and pip would take it for installed.
  for dist in .venv/lib/python3*/site-packages/*.dist-info; do
    if [[ ! -e $dist/RECORD ]]; then rm -rf "$dist"; fi
  done
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip --upgrade >/dev/null
  index=$(torch_index .venv/bin/python)
  .venv/bin/python -m pip install -qq -r requirements.lock ${index:+--extra-index-url "$index"}
  .venv/bin/python -m pip install -qq --no-deps --no-build-isolation -e . # setuptools is in the lock
}

make_conda() {
  local index="" verb=create
  if "$conda" env list | grep -qE '^ *drehr '; then verb=update; fi
  index=$(torch_index "$("$conda" run -n base python -c 'import sys; print(sys.executable)')")
  if [[ -n $index ]]; then export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} $index"; fi
  "$conda" env "$verb" -n drehr -f environment.yml
  python=$(conda_python) || die "conda made no environment named drehr."
}

conda_python() { "$conda" run -n drehr python -c 'import sys; print(sys.executable)' 2>/dev/null; }

if [[ ${1:-} != test ]]; then
  for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then usage && exit; fi
  done
fi

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
if [[ -n ${DREHR_PYTHON:-} ]]; then
  python=$DREHR_PYTHON
  "$python" -c "$new_enough" || die "DREHR_PYTHON=$DREHR_PYTHON is not a Python 3.11 or newer."
else
  conda=$(command -v conda || command -v mamba || true)
  if [[ -n $conda ]]; then python=$(conda_python || true); else python=$PWD/.venv/bin/python; fi
  # The folder counts too, because the environment points at it.
  stamp=$( (pwd && cat requirements.lock pyproject.toml environment.yml) | cksum)
  if [[ -z $python || $(cat "${python%/*}/../.drehr-stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "Making the environment (once: a few minutes, 2 GB of disk; more where there is a GPU) ..." >&2
    if [[ -n $conda ]]; then make_conda; else make_venv; fi
    echo "$stamp" >"${python%/*}/../.drehr-stamp"
  fi
fi

if [[ ${1:-} == test ]]; then
  shift
  exec "$python" -m pytest "$@"
fi
if [[ ${1:-} == site ]]; then
  # An environment of one's own is left alone: the module says what it lacks.
  if [[ -z ${DREHR_PYTHON:-} ]] && ! "$python" -c 'import latex2mathml, myst_nb, sphinx_book_theme' 2>/dev/null; then
    "$python" -m pip install -qq --no-build-isolation -c requirements.lock -e '.[site]'
  fi
  exec "$python" -m drehr_utils.use.site
fi
exec "$python" -m drehr_utils.run "$@"

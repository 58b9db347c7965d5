import os
import signal
import sys
import threading

import pytest

# No test may reach the network or open a window; set before any library reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
if "PYTEST_XDIST_WORKER" in os.environ:  # two processes of one thread each do more than one of two
    os.environ["OMP_NUM_THREADS"] = "1"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and some tests send it


@pytest.fixture(autouse=True)
def own_umask():
    """A protected profile, once loaded, closes its process's files to other users, and hides errors' messages: no test
    leaves that to the next."""
    before, hooks = os.umask(0o022), (sys.excepthook, threading.excepthook, sys.unraisablehook)
    yield
    os.umask(before)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def pytest_collection_modifyitems(items):
    """Files with slow tests first, or one of them would run alone at the end."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    from tiny_bert import tiny_bert

    return tiny_bert(tmp_path_factory.mktemp("start"))


@pytest.fixture
def tiny_smoke(monkeypatch, start):
    """The smoke profile with an encoder that takes no time, for this process."""
    from dataclasses import replace

    from drehr_utils import profiles

    monkeypatch.setitem(profiles.PROFILES, "smoke", replace(profiles.load_profile("smoke"), encoder=str(start)))
    return profiles.load_profile("smoke")

"""Every Python process of a canaries' run loads this (tests/planted.py): it writes down whom it calls and what it
writes outside the run's place, and fails where CANARY_FAULT says, as in "kill:kernel:7": at the seventh file that a
notebook's kernel opens of the protected data or cache."""

import os
import resource
import signal
import sys

PLACE, SAID = os.environ["CANARY_PLACE"], os.environ["CANARY_SAID"]
KIND, ROLE, AT = (os.environ.get("CANARY_FAULT") or "::0").split(":")
OWN = tuple(f"{PLACE}/{folder}" for folder in ("checkout/data/cache", "mimic", "index"))
LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")
MINE = ROLE == ("kernel" if "ipykernel_launcher" in " ".join(sys.orig_argv) else "command")
log, opened, within = os.open(f"{PLACE}/audit", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 0, False
most = resource.getrlimit(resource.RLIMIT_CORE)[1]
if "ipykernel_launcher" not in " ".join(sys.orig_argv):  # a kernel has its run's limit
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
if MINE and KIND == "size":  # as of a full disk: no file grows beyond so many bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(AT), int(AT)))


def say(*words):
    os.write(log, " ".join(map(str, words)).encode("utf-8", "replace") + b"\n")


def fire(path):
    say("fired", KIND, path)
    if KIND == "raise":
        raise RuntimeError(SAID)  # as of a library that quotes what it was given
    if KIND == "abort":
        os.abort()
    if KIND == "killrun":
        os.kill(os.getppid(), signal.SIGKILL)
    if KIND.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def hook(event, arguments):
    global opened, within
    if within or not event.startswith(("socket.", "open", "os.mkdir", "os.rename", "sqlite3.connect")):
        return
    within = True
    try:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if isinstance(arguments[1], tuple) and not str(arguments[1][0]).startswith(LOOPBACK):
                say("called", arguments[1])
        elif event.startswith(("socket.getaddrinfo", "socket.gethostby")):
            if arguments[0] and not str(arguments[0]).startswith(LOOPBACK):
                say("looked up", arguments[0])
        elif not event.startswith("socket.") and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(arguments[1 if event == "os.rename" else 0]))
            writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not path.startswith((PLACE, "/dev/", "/proc/")) and event != "sqlite3.connect":
                say("wrote", path)
            if path.startswith(OWN):
                opened += 1
                if MINE and opened == int(AT):
                    fire(path)
    finally:
        within = False


sys.addaudithook(hook)

"""What asking a language model takes (§3.1, §3.2): the client's ceiling, concurrency, back-off, a kill, a real model.

    python tests/benchmarks/bench_llm.py [--requests 1000] [--real MODEL_FOLDER] [--write]

The prompts are the paper's four, on chunks of the open notes; `llm.client.answer_all` asks them as notebooks 03 and 04
do, with a database on disk. The fake server is a process of its own, one thread that computes nothing:

- at no delay, the ceiling: answers a second of the client with its database, and processor seconds an answer;
- half a second an answer, about what a server with batches takes: answers a second by how many are in flight, beside
  the most there could be (in flight / delay);
- every tenth request refused (429, "try again"): all must be answered, and what it costs;
- killed (SIGKILL) half-way and run again: how many questions the server saw more than once.

`--real`: a folder with a model, served by `transformers serve` (pip install "transformers[serving]") on
this machine, 16 requests: tokens a second with one and eight in flight.
`--write`: also figures/benchmarks/llm.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from machine import about

from drehr_utils import corpus
from drehr_utils.llm.client import answer_all
from drehr_utils.llm.prompts import Request
from drehr_utils.llm.servers import Server
from drehr_utils.profiles import load_profile

ROOT = Path(__file__).resolve().parents[2]
ANSWER = "\n".join(f"- entity number {i} of a list" for i in range(8))  # about 60 tokens
IN_FLIGHT, DELAY = (1, 4, 16, 64), 0.5


def requests(number: int) -> list[Request]:
    """The first of the open training notes' questions, four a chunk."""
    found = [request for task in corpus.TASKS.values() for request in corpus.requests(load_profile("open"), task)]
    if number > len(found):
        raise SystemExit(f"--requests: the open notes have {len(found)}")
    return sorted(found, key=lambda request: request.id)[:number]


async def serve(sock: socket.socket, delay: float, refuse_every: int) -> None:
    """Answers each chat completion with ANSWER after `delay` seconds, and refuses every so many; GET says how many
    questions came and how many of them were different."""
    seen: dict[str, int] = {}
    came = 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").lower().split("\r\n")
                length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
                body, status, more = await reader.readexactly(length), "200 OK", ""
                if lines[0].startswith("get"):
                    said = {"came": came, "different": len(seen), "data": []}
                else:
                    came += 1
                    asked = json.loads(body)["messages"][0]["content"]
                    if refuse_every and came % refuse_every == 0:
                        status, more, said = "429 Too Many Requests", "Retry-After: 1\r\n", {"error": {"message": "no"}}
                    else:
                        seen[asked] = seen.get(asked, 0) + 1
                        await asyncio.sleep(delay)
                        message = {"role": "assistant", "content": ANSWER}
                        said = {"id": "c", "object": "chat.completion", "created": 0, "model": "m",
                                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                                "usage": {"prompt_tokens": len(asked) // 4, "completion_tokens": 60,
                                          "total_tokens": 0}}  # fmt: skip
                text = json.dumps(said).encode()
                kind = (
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(text)}\r\n\r\n"
                )
                writer.write(kind.encode() + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(connection, sock=sock, backlog=512)
    await server.serve_forever()


@contextmanager
def fake(delay: float = 0.0, refuse_every: int = 0) -> Iterator[str]:
    """The fake server's address, while its process lives."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.set_inheritable(True)
        command = [sys.executable, __file__, "--serve", str(sock.fileno()), str(delay), str(refuse_every)]
        with subprocess.Popen(command, pass_fds=[sock.fileno()]) as process:
            try:
                wait_for(f"http://127.0.0.1:{sock.getsockname()[1]}/v1", process)
                yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
            finally:
                process.kill()


def wait_for(url: str, process: subprocess.Popen, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx2.get(f"{url}/models", timeout=5)
            return
        except httpx2.HTTPError:
            time.sleep(0.2)
    raise SystemExit(f"{url}: no server")


def ask(url: str, number: int, in_flight: int, store: Path, model: str = "m", **options) -> dict[str, float]:
    asked, server = requests(number), Server(url, model, concurrency=in_flight, **options)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    answers = answer_all(asked, store=store, server=server, progress=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "answers": answers.asked,
        "failed": answers.failed,
        "per_s": round(answers.asked / seconds, 2),
        "cpu_ms": round(1000 * cpu / max(1, answers.asked), 2),
        "prompt_tokens_per_s": round(answers.prompt_tokens / seconds),
        "completion_tokens_per_s": round(answers.completion_tokens / seconds, 1),
    }


def killed_and_resumed(number: int, place: Path) -> dict[str, int]:
    """A process that asks is killed half-way; this one goes on."""
    with fake(delay=0.05) as url:
        command = [sys.executable, __file__, "--ask", url, str(number), str(place / "killed")]
        with subprocess.Popen(command) as process:
            while httpx2.get(f"{url}/models").json()["came"] < number // 2:
                time.sleep(0.02)
            process.kill()
        again = ask(url, number, 16, place / "killed")
        seen = httpx2.get(f"{url}/models").json()
    return {
        "answers_before": number - again["answers"],
        "asked_twice": seen["came"] - number,
        "failed": again["failed"],
    }


def real(folder: Path, place: Path) -> dict[str, float]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    result = {}
    with subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as process:
        try:
            url = f"http://127.0.0.1:{port}/v1"
            wait_for(url, process)
            ask(url, 2, 1, place / "first", str(folder), max_tokens=8)  # loads the model
            for in_flight in (1, 8):
                found = ask(url, 16, in_flight, place / f"real{in_flight}", str(folder), max_tokens=60)
                result |= {f"llm_real_{in_flight}_{key}": value for key, value in found.items()}
        finally:
            process.terminate()
    return result | {"llm_real_model": folder.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--real", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        number, delay, refuse_every = options.serve
        asyncio.run(serve(socket.socket(fileno=int(number)), float(delay), int(refuse_every)))
    if options.ask:
        url, number, store = options.ask
        ask(url, int(number), 16, Path(store))
        return
    result: dict[str, float | int | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with fake() as url:
            for in_flight in IN_FLIGHT:
                found = ask(url, options.requests, in_flight, place / f"ceiling{in_flight}")
                result |= {f"llm_ceiling_{in_flight}_{key}": value for key, value in found.items()}
        with fake(DELAY) as url:
            for in_flight in IN_FLIGHT:
                found = ask(url, min(options.requests, 16 * in_flight), in_flight, place / f"delay{in_flight}")
                result[f"llm_delay_{in_flight}_per_s"] = found["per_s"]
                result[f"llm_delay_{in_flight}_most"] = in_flight / DELAY
        with fake(refuse_every=10) as url:
            found = ask(url, options.requests, 16, place / "refused")
            result |= {f"llm_refused_{key}": value for key, value in found.items()}
        result |= {f"llm_killed_{k}": v for k, v in killed_and_resumed(options.requests, place).items()}
        if options.real:
            result |= real(options.real.resolve(), place) | about("llm_real_")
    result |= {"llm_requests": options.requests} | about("llm_")
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "figures/benchmarks/llm.json"
        kept = json.loads(path.read_text()) if path.exists() else {}  # the real model's
        path.write_text(json.dumps(kept | result, indent=1) + "\n")


if __name__ == "__main__":
    main()

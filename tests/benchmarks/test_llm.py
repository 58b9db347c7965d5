"""The benchmark's server answers, refuses and counts as it says, so that what it measures is the client."""

import httpx2
from bench_llm import ANSWER, ask, fake
from llm_server import chat_server


def test_refused_questions_are_asked_again_and_counted(tmp_path):
    with fake(refuse_every=4) as url:
        found = ask(url, 8, 2, tmp_path / "answers")
        seen = httpx2.get(f"{url}/models").json()
    assert (found["answers"], found["failed"]) == (8, 0)
    assert seen["different"] == 8 and seen["came"] == 10  # the fourth and the eighth came again


def test_another_server_gives_the_same_count(tmp_path):
    with chat_server(lambda prompt, body: ANSWER) as chat:
        assert ask(chat.base_url, 8, 2, tmp_path / "answers")["answers"] == len(chat.bodies) == 8

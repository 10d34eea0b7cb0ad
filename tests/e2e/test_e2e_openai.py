"""The OpenAI client against a live server."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.config.values import DEFAULT_GRAPHS
from tests.e2e.conftest import CONTEXT
from tests.e2e.live import LiveServer

pytestmark = pytest.mark.e2e

MODEL = "tiny-target"
REQUESTS = Path(__file__).parents[2] / "fixtures" / "requests"
PROMPT = "hello world"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def complete(server: LiveServer, prompt: Any = PROMPT, **options: Any) -> Any:
    """Completions with the extra options that the client does not know by name."""
    known = {"max_tokens", "temperature", "n", "seed", "stop", "stream", "stream_options"}
    extra = {name: value for name, value in options.items() if name not in known}
    named = {name: value for name, value in options.items() if name in known}
    return server.openai.completions.create(
        prompt=prompt, extra_body=extra, **{"max_tokens": 16, **GREEDY, **named}
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].text)


def test_models_and_health(server: LiveServer) -> None:
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert server.http.get("/health").json() == {"status": "ok"}


def test_speculation_does_not_change_the_answer_and_rounds_are_counted(server: LiveServer) -> None:
    fast = complete(server, return_token_ids=True)
    plain = complete(server, return_token_ids=True, num_speculative_tokens=0)
    assert fast.choices[0].token_ids == plain.choices[0].token_ids
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    details = fast.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    metrics = server.metrics()
    assert metrics["specctl_rounds_total"] > 0
    accepted = metrics["specctl_accepted_drafts_total"]
    positions = [metrics[f"specctl_accepted_drafts_at_position_total[{i}]"] for i in range(1, 5)]
    assert accepted == sum(positions)
    assert metrics["specctl_accept_length"] == pytest.approx(
        1 + accepted / metrics["specctl_rounds_total"]
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_stream_equals_the_whole_answer(server: LiveServer, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 7, "return_token_ids": True}
    whole = complete(server, **options)
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}, **options))
    *parts, last = chunks
    assert "".join(text_of(part) for part in parts) == text_of(whole)
    ids = [token for part in parts for token in part.choices[0].token_ids]
    assert ids == whole.choices[0].token_ids
    assert last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert len(ids) == whole.usage.completion_tokens == 16
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len(parts) <= len(ids)


def test_chat_stream_equals_the_whole_answer(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"messages": messages, "max_tokens": 12, **GREEDY}
    whole = server.openai.chat.completions.create(**options)
    parts = list(server.openai.chat.completions.create(stream=True, **options))
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    rendered = "system: Be brief.\nuser: hi\nassistant: "
    assert whole.usage.prompt_tokens == len(rendered)
    assert text == text_of(complete(server, rendered, max_tokens=12))


def test_end_id_and_stop_string_finish_with_stop(server: LiveServer) -> None:
    whole = complete(server, return_token_ids=True)
    ids, text = whole.choices[0].token_ids, text_of(whole)
    by_id = complete(server, stop_token_ids=[ids[9]], return_token_ids=True)
    cut = ids.index(ids[9]) + 1
    assert by_id.choices[0].token_ids == ids[:cut]
    assert by_id.choices[0].finish_reason == "stop"
    stop = text[8:11]
    by_text = complete(server, stop=[stop], return_token_ids=True)
    start = text.index(stop)
    with_text = [position for position, token in enumerate(ids) if token > 2]
    num_kept = with_text[start + 2] + 1  # the token that completes the stop string is kept
    assert text_of(by_text) == text[:start]
    assert by_text.choices[0].token_ids == ids[:num_kept]
    assert by_text.choices[0].finish_reason == "stop"
    assert by_text.usage.completion_tokens == num_kept
    streamed = complete(server, stop=[stop], stream=True)
    assert "".join(text_of(part) for part in streamed) == text[:start]


def test_same_seed_same_answer_alone_or_in_company(server: LiveServer) -> None:
    alone = text_of(complete(server, temperature=1, seed=42))
    with ThreadPoolExecutor(8) as pool:
        company = [
            pool.submit(complete, server, f"other {i}", temperature=1, seed=i) for i in range(6)
        ]
        again = [pool.submit(complete, server, temperature=1, seed=42) for _ in range(2)]
        assert {text_of(future.result()) for future in again} == {alone}
        assert all(future.result().choices for future in company)
    unseeded = [complete(server, temperature=1) for _ in range(3)]
    assert len({text_of(answer) for answer in unseeded}) > 1
    repeated = complete(server, temperature=1, seed=unseeded[0].seed)
    assert text_of(repeated) == text_of(unseeded[0])


def test_choices_are_distinct_repeatable_and_summed(server: LiveServer) -> None:
    first, again = [complete(server, n=3, temperature=1, seed=5) for _ in range(2)]
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens == 48
    assert first.usage.prompt_tokens == len(PROMPT)
    greedy = complete(server, n=3)
    assert len({choice.text for choice in greedy.choices}) == 1


def test_a_choice_that_ends_early_does_not_cut_the_others(server: LiveServer) -> None:
    options = {"n": 3, "temperature": 1, "seed": 11}
    whole = [choice.text for choice in complete(server, **options).choices]
    stop = next(letter for letter in whole[0][3:] if any(letter not in text for text in whole))
    cut = complete(server, stop=stop, **options).choices
    assert [choice.text for choice in cut] == [text.partition(stop)[0] for text in whole]
    reasons = ["stop" if stop in text else "length" for text in whole]
    assert [choice.finish_reason for choice in cut] == reasons


def test_prompt_forms_agree(server: LiveServer) -> None:
    ids = [3 + 1 + ord(character) - 32 for character in PROMPT]
    answers = [
        complete(server, prompt) for prompt in (PROMPT, ids, [PROMPT, "second"], [ids, ids[:3]])
    ]
    assert len({text_of(answer) for answer in answers}) == 1
    assert len(answers[2].choices) == len(answers[3].choices) == 2


def test_eight_at_once_equal_their_solo_runs(server: LiveServer) -> None:
    prompts = [f"prompt number {i} " + "x" * (13 * i) for i in range(8)]
    solo = [text_of(complete(server, prompt)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: text_of(complete(server, prompt)), prompts))
    assert together == solo


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_null_is_the_default(server: LiveServer, path: str, is_stream: bool) -> None:
    body: dict[str, Any] = {"temperature": None, "n": None, "stop": None, "stream": is_stream}
    if path == "/v1/completions":
        body |= {"prompt": PROMPT, "max_tokens": None}
    else:
        # A chat answer may fill the context: leave room for a few tokens only.
        filling = "x" * (CONTEXT - 33)
        body |= {"messages": [{"role": "user", "content": filling}], "max_tokens": None}
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n") is is_stream


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(json.loads(path.read_text()), id=path.stem)
        for path in sorted(REQUESTS.glob("*.json"))
    ],
)
def test_bad_request_is_refused_with_code_and_field(
    server: LiveServer, case: dict[str, Any]
) -> None:
    raw = case["raw"] if "raw" in case else json.dumps(case["body"])
    response = server.http.post(case["path"], content=raw)
    error = response.json()["error"]
    expect = case["expect"]
    found = {"status": response.status_code, "code": error["code"], "param": error["param"]}
    assert found == expect
    assert error["message"]


def test_the_client_sees_a_bad_request_error(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, max_tokens=0)
    assert caught.value.code == "SD904"
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="other", prompt="a")


@pytest.mark.parametrize("when", ["before headers", "after the first chunk", "in a long prefill"])
def test_a_client_that_goes_leaves_nothing_behind(server: LiveServer, when: str) -> None:
    before = server.wait_until_idle()["specctl_requests_total[disconnected]"]
    prompt = "y" * 1500 if when == "in a long prefill" else "y"
    body = {
        "prompt": prompt,
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "n": 2,
        "stream": when != "before headers",
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        if when == "after the first chunk":
            with client.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            leave_early(server, body)
    metrics = server.wait_until_idle()
    assert metrics["specctl_requests_total[disconnected]"] == before + 2
    assert text_of(complete(server)) == text_of(complete(server))


def leave_early(server: LiveServer, body: dict[str, Any]) -> None:
    """Send a request and close the connection once the server has it; nothing is read."""
    url, content = httpx.URL(server.url), json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall((head + content).encode())
        server.wait_until_open(body["n"])


def test_flush_keeps_running_answers_and_clears_counters(server: LiveServer) -> None:
    expected = text_of(complete(server, max_tokens=60))
    answers: list[str] = []
    running = threading.Thread(
        target=lambda: answers.append(text_of(complete(server, max_tokens=60)))
    )
    running.start()
    time.sleep(0.2)
    assert server.http.post("/flush_cache").json() == {"status": "flushed"}
    running.join()
    assert answers == [expected]
    complete(server, max_tokens=1)
    assert server.metrics()["specctl_steps_total"] < 70


def test_flushes_among_many_requests_change_no_answer(server: LiveServer) -> None:
    """More than run at once, greedy and sampled; the index is emptied under all of them."""
    asked = [
        {"prompt": f"{PROMPT} {number % 5}", "max_tokens": 12 + number, "seed": number}
        | {"temperature": 0.8 * (number % 2)}
        for number in range(14)
    ]
    calm = [text_of(complete(server, **options)) for options in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        running = [pool.submit(complete, server, **options) for options in asked]
        num_flushes = 0
        while not all(answer.done() for answer in running) or num_flushes == 0:
            assert server.http.post("/flush_cache").json() == {"status": "flushed"}
            num_flushes += 1
            time.sleep(0.05)
        assert [text_of(answer.result()) for answer in running] == calm
    server.wait_until_idle()
    assert [text_of(complete(server, **options)) for options in asked[:3]] == calm[:3]


def test_info_names_origins(server: LiveServer) -> None:
    info = server.http.get("/info").json()
    assert info["settings"]["max_num_requests"] == {"value": 8, "origin": "given"}
    assert info["settings"]["num_speculative_tokens"] == {"value": 4, "origin": "manifest"}
    assert info["server"]["port"]["origin"] == "given"
    assert info["server"]["grace_s"]["origin"] == "default"
    assert info["manifest"]["verification"] == "seeded"
    assert info["settings"]["graphs"] == {"value": DEFAULT_GRAPHS, "origin": "default"}
    assert info["graphs"] == {
        "num_graphs": 0,
        "capture_s": 0.0,
        "memory_bytes": 0,
        "skipped_batches": [],
        "skipped_prefill_rows": [],
        "num_warm_steps": 0,
        "warm_up_s": 0.0,
    }

"""Request bodies: every fixture gives its code, status and field; good bodies give their values."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.server.errors import error_object, error_param, http_status
from runtime.server.options import OPTIONS, options_for
from runtime.server.parse import decode_body, parse_chat, parse_completion
from runtime.server.prepare import Prepared, prepare_chat, prepare_completion
from specctl.contract.codes import CODES
from specctl.contract.diagnostics import DiagnosticError
from tests.unit.runtime.server.scripted_engine import TOKENIZER, served_model

REQUESTS = Path(__file__).parents[4] / "fixtures" / "requests"
ROUTED = ("/v1/completions", "/v1/chat/completions")


def prepare(path: str, raw: bytes, **served: object) -> Prepared:
    body = decode_body(raw)
    if path == "/v1/completions":
        return prepare_completion(parse_completion(body), served_model(**served), "cmpl-1")
    return prepare_chat(parse_chat(body), served_model(**served), "chatcmpl-1")


def problem(path: str, body: object, **served: object) -> DiagnosticError:
    with pytest.raises(DiagnosticError) as caught:
        prepare(path, json.dumps(body).encode(), **served)
    return caught.value


def fixture_cases() -> list[Any]:
    cases = [(path.stem, json.loads(path.read_text())) for path in sorted(REQUESTS.glob("*.json"))]
    return [pytest.param(case, id=name) for name, case in cases if case["path"] in ROUTED]


@pytest.mark.parametrize("case", fixture_cases())
def test_bad_request_gives_its_code_status_and_field(case: dict[str, Any]) -> None:
    raw = case["raw"].encode() if "raw" in case else json.dumps(case["body"]).encode()
    with pytest.raises(DiagnosticError) as caught:
        prepare(case["path"], raw)
    first = caught.value.diagnostics[0]
    expect = case["expect"]
    assert (first.code, http_status(first), error_param(first)) == (
        expect["code"],
        expect["status"],
        expect["param"],
    )
    error: Any = error_object(caught.value.diagnostics)["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_fixtures_cover_every_code_that_a_body_can_cause() -> None:
    cases = [json.loads(path.read_text()) for path in REQUESTS.glob("*.json")]
    body_codes = {"SD901", "SD902", "SD903", "SD904", "SD905", "SD906", "SD907", "SD908"}
    body_codes |= {"SD909", "SD910", "SD918", "SD919"}
    assert {case["expect"]["code"] for case in cases} == body_codes


def test_every_refused_option_has_a_fixture_or_the_same_reason_as_one() -> None:
    cases = [json.loads(path.read_text()) for path in REQUESTS.glob("*.json")]
    covered = {case["expect"]["param"] for case in cases if case["expect"]["code"] == "SD905"}
    notes = {option.note for option in OPTIONS if option.name in covered}
    refused = [option for option in OPTIONS if not option.is_honoured]
    own_reason = {"modalities", "audio", "prediction", "reasoning_effort", "verbosity"}
    own_reason |= {"web_search_options", "store", "metadata", "service_tier"}
    assert {o.name for o in refused if o.note not in notes} == own_reason
    for option in refused:
        path = ROUTED["completions" not in option.endpoints]
        found = problem(path, {option.name: "anything else"})
        assert ("SD905", option.name) in {(d.code, error_param(d)) for d in found.diagnostics}, (
            option.name
        )


def test_neutral_values_of_refused_options_pass() -> None:
    body: dict[str, object] = {"prompt": [5]}
    for option in options_for("completions").values():
        if not option.is_honoured:
            body[option.name] = option.neutral[-1]
    assert prepare("/v1/completions", json.dumps(body).encode()).inputs


def test_one_is_not_true() -> None:
    found = problem("/v1/completions", {"prompt": [5], "best_of": True, "echo": 0})
    assert [d.code for d in found.diagnostics] == ["SD905", "SD905"]


def test_all_problems_come_together_and_the_message_says_so() -> None:
    found = problem("/v1/completions", {"prompt": 3, "temprature": 1, "n": 0})
    assert sorted(d.code for d in found.diagnostics) == ["SD902", "SD903", "SD904"]
    message = error_object(found.diagnostics)["error"]["message"]  # type: ignore[index]
    assert "`temperature`" in message
    assert "2 more" in message


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "min_tokens", "num_speculative_tokens"])
@pytest.mark.parametrize("value", [2**63, 10**400])
def test_an_integer_that_no_device_holds_is_refused(name: str, value: int) -> None:
    found = problem("/v1/completions", {"prompt": [5], name: value}).diagnostics
    assert [(d.code, error_param(d)) for d in found] == [("SD904", name)]
    assert found[0].expected == f"at most {2**63 - 1}"


def test_prompt_too_long_names_both_numbers() -> None:
    first = problem("/v1/completions", {"prompt": [5] * 600}).diagnostics[0]
    assert "600" in first.message
    assert "512" in first.message


def test_defaults_and_nulls() -> None:
    null = {name: None for name in options_for("completions") if name != "prompt"}
    prepared = prepare("/v1/completions", json.dumps({**null, "prompt": [5, 6]}).encode())
    (request,) = prepared.inputs
    params = request.params
    assert request.max_tokens == 16
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert params.seed == prepared.seed
    assert request.has_seed
    chat = prepare("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
    assert chat.inputs[0].max_tokens is None


def test_values_reach_the_engine_request() -> None:
    body = {
        "prompt": "ab",
        "model": "tiny",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "3": 1.5},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x", "yz"],
        "stop_token_ids": [4],
        "num_speculative_tokens": 0,
        "user": "somebody",
    }
    (request,) = prepare("/v1/completions", json.dumps(body).encode()).inputs
    params = request.params
    assert list(request.prompt_ids_target) == TOKENIZER.encode("ab").ids
    assert (request.max_tokens, request.stop, request.stop_ids) == (9, ("x", "yz"), (4,))
    assert request.ignore_eos
    assert request.num_speculative_tokens == 0
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (-1.0, 2.0)
    assert (params.repetition_penalty, params.min_tokens, params.seed) == (1.5, 2, -5)
    assert params.logit_bias == ((3, 1.5), (7, -100.0))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [TOKENIZER.encode("ab").ids]),
        (["a", "bc"], [TOKENIZER.encode("a").ids, TOKENIZER.encode("bc").ids]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_four_prompt_forms(prompt: object, expected: list[list[int]]) -> None:
    prepared = prepare("/v1/completions", json.dumps({"prompt": prompt}).encode())
    assert [list(request.prompt_ids_target) for request in prepared.inputs] == expected


def test_choices_have_their_own_noise_index_and_ids() -> None:
    body = {"prompt": [[5], [6]], "n": 3, "seed": 9}
    prepared = prepare("/v1/completions", json.dumps(body).encode())
    assert [request.params.choice_index for request in prepared.inputs] == [0, 1, 2, 3, 4, 5]
    assert [list(request.prompt_ids_target) for request in prepared.inputs] == [[5]] * 3 + [[6]] * 3
    assert len({request.request_id for request in prepared.inputs}) == 6
    assert {request.params.seed for request in prepared.inputs} == {9}


def test_unseeded_requests_draw_different_seeds() -> None:
    seeds = {prepare("/v1/completions", b'{"prompt": [5]}').seed for _ in range(20)}
    assert len(seeds) == 20


def test_chat_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3}
    (request,) = prepare("/v1/chat/completions", json.dumps(body).encode()).inputs
    expected = TOKENIZER.encode("user: a\nb|", add_special_tokens=False).ids
    assert list(request.prompt_ids_target) == expected
    assert request.max_tokens == 3


def test_text_without_a_tokenizer_is_refused_and_ids_are_not() -> None:
    found = problem("/v1/completions", {"prompt": "ab"}, tokenizer=None)
    assert found.diagnostics[0].code == "SD911"
    found = problem("/v1/completions", {"prompt": [5], "stop": "a"}, tokenizer=None)
    assert found.diagnostics[0].code == "SD911"
    assert prepare("/v1/completions", b'{"prompt": [5]}', tokenizer=None).inputs


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(ROUTED),
    st.dictionaries(st.sampled_from([option.name for option in OPTIONS]), json_values, max_size=4),
)
def test_any_body_is_parsed_or_refused_with_a_field(path: str, body: dict[str, object]) -> None:
    try:
        prepared = prepare(path, json.dumps(body).encode())
    except DiagnosticError as error:
        for diagnostic in error.diagnostics:
            assert diagnostic.code in CODES
            assert diagnostic.where.startswith("body#")
    else:
        assert prepared.inputs


@pytest.mark.parametrize("depth", [990, 5000, 100_000])
def test_deep_nesting_is_refused_like_any_other_body(depth: int) -> None:
    with pytest.raises(DiagnosticError) as caught:
        decode_body(b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")
    (found,) = caught.value.diagnostics
    assert found.code == "SD901"
    assert "deep" in found.message


def test_the_range_of_seeds_is_named_exactly() -> None:
    found = problem("/v1/completions", {"prompt": [5], "seed": 2**63}).diagnostics[0]
    assert found.expected == "-9223372036854775808 to 9223372036854775807"
    assert prepare("/v1/completions", b'{"prompt": [5], "seed": 9223372036854775807}').inputs


@pytest.mark.parametrize("key", ["9" * 5000, "007", "+7", ""])
def test_a_bias_key_is_one_decimal_number(key: str) -> None:
    """Two spellings of one id would leave open which bias counts."""
    found = problem("/v1/completions", {"prompt": [5], "logit_bias": {key: 1}}).diagnostics[0]
    assert found.code == "SD903"
    assert found.where.startswith("body#/logit_bias/")


def test_encoding_a_long_prompt_lets_other_threads_run() -> None:
    """The tokenizer's own `encode` holds the interpreter: /health would wait for it."""
    body = json.dumps({"prompt": "ab" * 200_000}).encode()
    refusals: list[DiagnosticError] = []

    def refuse() -> None:
        with pytest.raises(DiagnosticError) as caught:
            prepare("/v1/completions", body)
        refusals.append(caught.value)

    thread = threading.Thread(target=refuse)
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert [error.diagnostics[0].code for error in refusals] == ["SD909"]
    assert turns > 10

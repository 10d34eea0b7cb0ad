"""The facade: a manifest file in, whole answers out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.probe import row_invariance_problems
from runtime.engine.request import RequestDelta, RequestInput
from runtime.kernels import RowInvariance
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, prompt_of, reference_ids
from tests.tiny_manifest import write_manifest

REQUESTS = tuple(
    RequestInput(
        request_id=str(index),
        prompt_ids_target=prompt_of(index, 4 + index),
        max_tokens=6,
        ignore_eos=True,
    )
    for index in range(5)
)
SMALL = Overrides(device="cpu", max_num_requests=2, max_num_waiting=1, max_model_len=64)


@pytest.fixture(scope="session")
def manifest_path(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("llm"), world.manifest)


def test_generate_answers_in_order_and_streams(world: World, manifest_path: Path) -> None:
    """Five requests through a queue that holds three."""
    deltas: list[RequestDelta] = []
    llm = LLM.from_manifest(manifest_path, SMALL)
    completions = llm.generate(REQUESTS, on_delta=deltas.append)
    assert [item.request_id for item in completions] == [item.request_id for item in REQUESTS]
    for request, completion in zip(REQUESTS, completions, strict=True):
        assert completion.ids_target == reference_ids(world, request)
        assert completion.text == world.tokenizer.decode(list(completion.ids_target))
        mine = [delta for delta in deltas if delta.request_id == request.request_id]
        assert "".join(delta.text for delta in mine) == completion.text
        assert (completion.finish_reason, completion.error) == ("length", None)
    assert llm.config.proposer == "eagle3"
    assert llm.diagnostics == ()


def test_a_refused_request_leaves_the_engine_empty(manifest_path: Path) -> None:
    llm = LLM.from_manifest(manifest_path, SMALL)
    with pytest.raises(DiagnosticError, match="SD908"):
        llm.generate([REQUESTS[0], replace(REQUESTS[1], prompt_ids_target=())])
    assert not llm.engine.has_work
    llm.engine.check()


def test_ids_alone_need_no_tokenizer(manifest_path: Path) -> None:
    llm = LLM.from_manifest(manifest_path, replace(SMALL, proposer="none"), needs_tokenizer=False)
    assert llm.tokenizer is None
    assert llm.generate(REQUESTS[:1])[0].text == ""


def test_the_oracle_needs_a_script(manifest_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="SD807"):
        LLM.from_manifest(manifest_path, replace(SMALL, proposer="oracle"))


def test_the_probe_multiplies_the_weights_that_serving_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []

    def note(weight: torch.Tensor, *, is_head: bool = False) -> RowInvariance:
        probed.append((weight.shape[0], is_head))
        return RowInvariance(product="product", largest_difference=0.0)

    monkeypatch.setattr("runtime.engine.probe.row_invariance_probe", note)
    target = world.models.target
    assert row_invariance_problems(target) == ()
    assert target.num_reachable_ids < target.facts.vocab_size
    without_padding = (target.num_reachable_ids, True)
    assert probed[-1] == without_padding, "the head without the ids nobody can choose"
    assert not any(is_head for _, is_head in probed[:-1])


def test_a_machine_whose_rows_vary_is_refused(
    manifest_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts it is an error; plain decoding only loses the promise, so it is a warning."""

    def varying(*args: object, **facts: object) -> RowInvariance:
        return RowInvariance(product="float32 product", largest_difference=1e-7)

    monkeypatch.setattr("runtime.engine.probe.row_invariance_probe", varying)
    monkeypatch.setattr("runtime.engine.probe.attention_invariance_probe", varying)
    with pytest.raises(DiagnosticError) as refused:
        LLM.from_manifest(manifest_path, SMALL)
    found = refused.value.diagnostics
    assert {item.code for item in found} == {"SD831"}
    assert len(found) == 6, "qkv, o, gate and up, down, head, and attention"
    plain = LLM.from_manifest(manifest_path, replace(SMALL, proposer="none"))
    assert {item.severity for item in plain.diagnostics} == {"warning"}

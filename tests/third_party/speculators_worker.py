"""Run Speculators in a process of its own: load strictly, trace a forward pass, build and save.

It runs under the Python of the environment that holds the library, not under that of the tests, and
imports nothing of this repository. One JSON request a line on stdin, one JSON answer a line on
stdout. Importing the library takes seconds, so that one process serves a whole test session.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from safetensors import safe_open
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import eager, resolve_loss_config
from speculators.losses import utils as losses

SEQUENCE = 128  # the attention's masks are built in blocks of this
INFO: dict[str, Any] = {}
_from_pretrained = transformers.PreTrainedModel.from_pretrained.__func__


def _with_info(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Keep what the library's loader throws away: missing, unexpected and mismatched keys."""
    if not issubclass(cls, SpeculatorModel):
        return _from_pretrained(cls, *args, **kwargs)
    model, info = _from_pretrained(cls, *args, output_loading_info=True, **kwargs)
    INFO.clear()
    INFO.update({name: sorted(map(str, value)) for name, value in info.items()})
    return model


transformers.PreTrainedModel.from_pretrained = classmethod(_with_info)
# A forward pass ends in its loss, whose usual kernels need a GPU; the plain ones compute the same.
losses._fused_kernel = lambda name: getattr(eager, name.removeprefix("fused_"))


def load(request: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint; return its keys that found no place and parameters that found no key."""
    model = SpeculatorModel.from_pretrained(request["directory"])
    state = model.state_dict()
    return {
        "type": type(model).__name__,
        "mismatched": INFO["mismatched_keys"],
        "keys": _keys(request["directory"]),
        "not_finite": sorted(
            name for name, value in state.items()
            if value.is_floating_point() and not bool(torch.isfinite(value).all())
        ),
        "zero": sorted(
            name for name, value in state.items()
            if value.is_floating_point() and value.dim() > 1 and not bool(value.any())
        ),
        "shapes": {name: list(value.shape) for name, value in state.items()},
        "digests": {name: _digest(value) for name, value in state.items()},
    }  # fmt: skip


def _keys(directory: str) -> list[str]:
    """Return what the files hold: the library's own list leaves out what it expects to miss."""
    keys: list[str] = []
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            keys += stored.keys()
    return keys


def trace(request: dict[str, Any]) -> dict[str, Any]:
    """Run one forward pass on fixed inputs; return digests of all outputs, and the logits.

    `steps` has the logits of every call of the head, `logits` those of the first.
    """
    model = SpeculatorModel.from_pretrained(request["directory"]).to(torch.float32).eval()
    if hasattr(model, "refiner_head"):
        # The library's loader builds models without memory and leaves this buffer, which no file
        # holds, as whatever the memory held.
        mask = model.refiner_head.causal_tril
        model.refiner_head.causal_tril = torch.tril(torch.ones_like(mask))
    digest = hashlib.sha256()
    logits: list[torch.Tensor] = []

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor):
                digest.update(name.encode() + _bytes(value))
                if name == "lm_head":
                    logits.append(value.detach())

        return hook

    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(note(name))
    torch.manual_seed(0)
    with torch.no_grad():
        model(**_inputs(model))
    return {
        "digest": digest.hexdigest(),
        "shape": list(logits[0].shape),
        "logits": logits[0].flatten()[:2000].tolist(),
        "steps": [step.flatten()[:2000].tolist() for step in logits],
        "is_finite": all(bool(torch.isfinite(value).all()) for value in logits),
    }


def blocks(request: dict[str, Any]) -> dict[str, Any]:
    """Run a block draft on fixed inputs; return what its heads make of the asked-for anchors.

    The answer has a list for each anchor, over the block's slots: `base` and `corrected` logits
    (equal without a Markov head; a selector's scores, -inf elsewhere), and `confidence` log odds
    (None without that head).
    """
    from speculators.models.dspark import core

    model = SpeculatorModel.from_pretrained(request["directory"]).to(torch.float32).eval()
    found: dict[str, Any] = {}
    model.lm_head.register_forward_hook(lambda _, args, out: found.update(hidden=args[0], base=out))
    judge = core.compute_metrics

    def note(logits: Any, targets: Any, confidence: Any, *args: Any, **kwargs: Any) -> Any:
        found.update(corrected=logits, confidence=confidence)
        return judge(logits, targets, confidence, *args, **kwargs)

    core.compute_metrics = note
    try:
        with torch.no_grad():
            inputs = _inputs(model)
            model(**inputs)
    finally:
        core.compute_metrics = judge
    size = model.config.block_size
    if hasattr(model, "candidate_selector"):
        found["corrected"] = _selected(model, inputs["input_ids"], found)

    def of_anchors(name: str, source: str) -> Any:
        value = found.get(name, found.get(source))
        if value is None:
            return None
        rows = value.view(-1, size, *value.shape[2:])
        return [rows[anchor].tolist() for anchor in request["anchors"]]

    return {
        "base": of_anchors("base", "base"),
        "corrected": of_anchors("corrected", "base"),
        "confidence": of_anchors("confidence", "confidence"),
    }


def rollouts(request: dict[str, Any]) -> dict[str, Any]:
    """Run a P-EAGLE draft on fixed inputs; return the logits of the asked-for rollouts.

    The answer has a list for each anchor: logits at depth 0 (the entry itself), 1, 2, ... The class
    draws its rollouts at random; here they are the anchors', whole.
    """
    from speculators.models.peagle import core

    model = SpeculatorModel.from_pretrained(request["directory"]).to(torch.float32).eval()
    anchors, depths = request["anchors"], request["depths"]
    places = [(p, 0) for p in range(SEQUENCE)]
    places += [(anchor, depth) for anchor in anchors for depth in range(1, depths)]
    anchor_pos, depth = torch.tensor(places).T
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, args, out: found.append(out[0]))
    draw = core.generate_cod_sample_indices
    core.generate_cod_sample_indices = lambda **_: (anchor_pos, depth)
    try:
        with torch.no_grad():
            model(**_inputs(model), num_depths=depths)
    finally:
        core.generate_cod_sample_indices = draw
    order = {place: row for row, place in enumerate(places)}
    return {
        "logits": [
            [found[0][order[anchor, depth]].tolist() for depth in range(depths)]
            for anchor in anchors
        ]
    }


def _selected(model: Any, ids: Any, found: dict[str, Any]) -> Any:
    """Return the selector's scores over the vocabulary for a block at each position."""
    count = found["base"].shape[1] // model.config.block_size
    starts = torch.arange(count).clamp(max=SEQUENCE - model.config.block_size)
    slots = (starts[:, None] + torch.arange(model.config.block_size)).flatten()
    before = model._predecessor_ids(ids, slots).reshape(1, -1)
    with torch.no_grad():
        chosen, scores = model.candidate_selector.select(found["base"], found["hidden"], before)
    return torch.full_like(found["base"], float("-inf")).scatter(-1, chosen, scores)


def _inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    config = model.config
    layers = config.transformer_layer_config
    width = getattr(config, "target_hidden_size", None) or layers.hidden_size
    ids = torch.randint(0, layers.vocab_size, (1, SEQUENCE), generator=generator)
    kind = config.speculators_model_type
    if kind == "mtp":
        hidden = torch.randn(1, SEQUENCE, layers.hidden_size, generator=generator)
        return {"input_ids": ids, "hidden_states": hidden}
    captured = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or getattr(
        config, "aux_hidden_state_layer_ids", None
    )
    hidden = torch.randn(1, SEQUENCE, width * len(captured), generator=generator)
    inputs: dict[str, Any] = {
        "hidden_states": hidden,
        "input_ids": ids,
        "document_ids": torch.zeros(1, SEQUENCE, dtype=torch.long),
    }
    if kind != "eagle3":
        last = torch.randn(1, SEQUENCE, width, generator=generator)
        inputs |= {
            "loss_mask": torch.ones(1, SEQUENCE, dtype=torch.bool),
            "verifier_last_hidden_states": last,
        }
    if kind not in ("eagle3", "peagle"):  # block drafts: one block at each position, not thousands
        inputs["max_anchors"] = SEQUENCE
    if kind == "peagle":  # its forward always computes a loss; the default one needs Triton
        inputs["loss_config"] = resolve_loss_config("kl_div", implementation="eager")
    return inputs


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Build a model from a config, give it seeded weights, save it; return its type."""
    config = SpeculatorModelConfig.from_dict(request["config"])
    torch.manual_seed(1)
    model = SpeculatorModel.registered_model_class_from_config(config)(config=config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = torch.ones if "norm" in name else torch.randn
            value.copy_(scale(value.shape) * (1.0 if "norm" in name else 0.05))
    if request.get("ids") is not None:
        ids = torch.tensor(request["ids"])
        mask = torch.zeros(config.transformer_layer_config.vocab_size, dtype=torch.bool)
        mask[ids] = True
        model.load_vocab_mappings(mask, ids - torch.arange(len(ids)))
    model.to(torch.bfloat16).save_pretrained(request["directory"])
    return {"type": type(model).__name__}


def convert(request: dict[str, Any]) -> dict[str, Any]:
    """Run the library's own converter."""
    from speculators.convert.entrypoints import convert_model

    convert_model(
        model=request["directory"],
        verifier=request["target"],
        algorithm=request["algorithm"],
        output_path=request["output"],
        validate_device=None,
        **request.get("kwargs", {}),
    )
    return {}


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(value)).hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


OPERATIONS = {
    "load": load,
    "trace": trace,
    "blocks": blocks,
    "rollouts": rollouts,
    "build": build,
    "convert": convert,
}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library prints
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": OPERATIONS[request["operation"]](request)}
        except Exception as error:  # noqa: BLE001  (the test that asked reports it)
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

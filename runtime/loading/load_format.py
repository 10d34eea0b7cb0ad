"""In which form weights are read: the formats that can be read again, and what a dummy yields.

A stage without the target's embedding reads that tensor from the target's files for its draft, so
every format must allow a second look at the same files. The others are refused by name.
*Source:* the names are those of vLLM's and SGLang's `--load-format`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, get_args

import torch

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Draft, Manifest, Target

LoadFormat = Literal["auto", "safetensors", "dummy"]
"""`auto` takes each file as it is; `safetensors` refuses other files; `dummy` reads no weight."""

_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("remote", "remote_instance", "runai_streamer", "runai_streamer_sharded", "tensorizer"),
        "it streams weights, and a stream cannot be read a second time for the draft's embedding",
    ),
    **dict.fromkeys(
        ("sharded_state", "bitsandbytes", "gguf", "layered", "flash_rl"),
        "its files hold other tensors than the manifest describes",
    ),
}
_STD = 0.02  # of dummy matrices: states stay finite over any number of layers


def parse_load_format(name: str) -> LoadFormat:
    """Return the format of a name.

    Raises:
        DiagnosticError: SD857, it cannot be served or is not known.
    """
    found = next((item for item in _FORMATS if item == name), None)
    if found is not None:
        return found
    reason = _REFUSED.get(name, "this version does not know it")
    raise DiagnosticError(
        diagnose(
            "SD857",
            where="--load-format",
            message=f"load format `{name}` is refused: {reason}",
            expected=", ".join(_FORMATS),
            found=name,
        )
    )


def file_problems(manifest: Manifest, load_format: LoadFormat) -> list[Diagnostic]:
    """Return SD857 for every file that `safetensors` does not cover."""
    if load_format != "safetensors":
        return []
    sources: list[Target | Draft] = [manifest.target]
    if manifest.draft is not None:
        sources.append(manifest.draft)
    return [
        diagnose(
            "SD857",
            where=f"{source.source}/{file.file}",
            message="load format `safetensors` is asked for, and this file is none",
            expected="files that end in .safetensors",
            found=file.file,
        )
        for source in sources
        for file in source.files
        if not file.file.endswith(".safetensors")
    ]


def dummy_weight(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 numbers that the key alone decides: every stage and rank makes the same.

    Vectors are ones, as norms are before training.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.empty(shape).normal_(0.0, _STD, generator=generator)

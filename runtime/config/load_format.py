"""In which form weights are read: the formats that can be read again; the others refused by name.

A stage without the target's embedding reads that tensor from the target's files for its draft, so
every format must allow a second look at the same files.
*Source:* the names are those of vLLM's and SGLang's `--load-format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from runtime.config.ledger import Ledger
from runtime.config.values import LoadFormat

DEFAULT_LOAD_FORMAT: LoadFormat = "auto"
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


def settle_load_format(ledger: Ledger) -> LoadFormat:
    """Return how weights are read; the finding is SD857, a format that is refused or not known."""
    name = ledger.pick("load_format", DEFAULT_LOAD_FORMAT)
    found = next((item for item in _FORMATS if item == name), None)
    if found is not None:
        return found
    reason = _REFUSED.get(name, "this version does not know it")
    ledger.refuse(
        "SD857",
        "load_format",
        f"load format `{name}` is refused: {reason}",
        expected=", ".join(_FORMATS),
        found=name,
    )
    return DEFAULT_LOAD_FORMAT

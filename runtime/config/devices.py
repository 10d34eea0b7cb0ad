"""Which device runs, and in which element type."""

from __future__ import annotations

import torch

from runtime.config.ledger import Ledger
from runtime.config.values import DEVICE_DTYPES, DTYPES
from specctl.contract.manifest import Manifest

_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def make_current(device: torch.device) -> None:
    """Let the calling thread launch kernels and record events on a device; a CPU needs nothing.

    Tensors name their device, kernels of Triton and events do not: they go to the current one,
    which each thread has for itself and which is the first GPU at the thread's start.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def settle_device(ledger: Ledger) -> torch.device:
    """Return the device: `auto` takes the first GPU if there is one (SD830 when absent).

    A GPU is the current one of this thread from now on.
    """
    name = ledger.pick("device", "auto")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {"cpu": torch.device("cpu")}
    names |= {f"cuda:{index}": torch.device("cuda", index) for index in range(num_gpus)}
    if num_gpus:
        names["cuda"] = names["cuda:0"]
    names["auto"] = names.get("cuda", names["cpu"])
    if name not in names:
        ledger.refuse(
            "SD830",
            "device",
            f"there is no device `{name}`",
            expected=", ".join(names),
            found=name,
        )
        return names["cpu"]
    make_current(names[name])
    return names[name]


def settle_dtype(ledger: Ledger, manifest: Manifest, device: torch.device) -> torch.dtype:
    """Return the element type: float32 on a CPU, the stored one on a GPU (SD809 if unsupported)."""
    allowed = DEVICE_DTYPES[device.type]
    stored = _STORED_DTYPES.get(manifest.target.dtype)
    if device.type == "cpu" or stored is None:
        name = ledger.pick("dtype", allowed[0])
    else:
        name = ledger.pick("dtype", stored, origin="manifest")
    if name in allowed:
        return DTYPES[name]
    ledger.refuse(
        "SD809",
        "dtype",
        f"`{device.type}` does not run `{name}`",
        expected=" or ".join(allowed),
        found=name,
    )
    return DTYPES[allowed[0]]

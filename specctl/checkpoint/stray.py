"""Report safetensors files beside the checkpoint: what they hold decides how bad they are.

Invariants: only headers are read, and nothing of a stray file becomes part of the checkpoint.
*Source:* vLLM issue 54230: a loader that reads every file it finds let a file beside the index
overwrite the indexed weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from specctl.checkpoint.safetensors_header import needed_bytes, read_header
from specctl.checkpoint.sources.store import PREFETCH_FILES, FileStore
from specctl.checkpoint.tensor_entry import TensorEntry, shown
from specctl.contract.findings import Findings


def report_stray(
    store: FileStore,
    names: list[str],
    winner: str,
    tensors: Mapping[str, TensorEntry],
    findings: Findings,
) -> None:
    """Report each file once: SD104 when it holds tensors of the checkpoint again, else SD124.

    Args:
        store: where the files are.
        names: safetensors files that were not read.
        winner: the file that decides which ones are.
        tensors: tensor name -> entry of the checkpoint.
        findings: receives SD104 and SD124.
    """
    for place, name in enumerate(names):
        if place % PREFETCH_FILES == 0:
            ahead = names[place : place + PREFETCH_FILES]
            store.prefetch(dict.fromkeys(ahead, needed_bytes))
        own = Findings()  # of a file that is no part of the checkpoint: only its names matter
        entries, _ = read_header(store, name, own)
        again = [entry for entry in entries if entry.key in tensors]
        if again:
            _report_again(again, len(entries), winner, tensors, findings)
        else:
            report_ignored(name, winner, findings, is_read=bool(entries) or not own.result())


def report_ignored(name: str, winner: str, findings: Findings, *, is_read: bool = True) -> None:
    """Report SD124 for a weight file that was passed over.

    Args:
        name: the file.
        winner: the file that decides which ones are read.
        findings: receives it.
        is_read: false for a header that cannot be read, so that nobody knows what is in it.
    """
    findings.add(
        "SD124",
        where=shown(name),
        message=f"not part of the checkpoint: `{winner}` decides which files are read",
        notes=() if is_read else ("its header cannot be read, so its tensors are not known",),
    )


def _report_again(
    again: list[TensorEntry],
    num_stored: int,
    winner: str,
    tensors: Mapping[str, TensorEntry],
    findings: Findings,
) -> None:
    first = again[0]
    name, right = shown(first.file), shown(tensors[first.key].file)
    findings.add(
        "SD104",
        where=first.describe(),
        message=f"`{name}` is not part of the checkpoint, as `{winner}` decides, and holds "
        f"{len(again)} of its tensors again: `{shown(first.key)}` is also in `{right}`",
        expected="one file for each tensor",
        found=f"{len(again)} of the {num_stored} tensors of `{name}` in two files",
        help=f"Move `{name}` out of the directory: engines that read every file they find load "
        "its tensors over the right ones",
    )

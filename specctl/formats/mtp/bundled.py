"""What a target's reader says of the prediction layers inside it: which tensors, and promises."""

from __future__ import annotations

import re
from collections.abc import Collection

from specctl.checkpoint import Checkpoint
from specctl.contract.findings import Findings
from specctl.formats.assemble import is_whole
from specctl.formats.fields import Fields
from specctl.formats.mtp.config import read_count
from specctl.formats.mtp.families import BY_NAME
from specctl.formats.mtp.part import find_part

_PART = re.compile(r"(?:^|\.)(?:mtp\w*|nextn\w*)(?:\.|$)")


def bundled_keys(checkpoint: Checkpoint, format: str | None) -> frozenset[str]:
    """Return the keys of the prediction layers inside a target.

    Args:
        checkpoint: the opened target.
        format: of its bundled draft; for a format of another family, or None, the keys that lie
            below a part named like prediction layers.
    """
    family = BY_NAME.get(format or "")
    if family is None:
        named = [key for key in checkpoint.tensors if "mtp" in key or "nextn" in key]
        return frozenset(key for key in named if _PART.search(key))
    part = find_part(family, checkpoint.tensors)
    return frozenset() if part is None else frozenset(part.roles)


def report_bundled(
    checkpoint: Checkpoint, format: str | None, root: Fields, text: Fields
) -> Collection[str]:
    """Return the keys of the prediction layers inside a target; SD240, SD327.

    Args:
        checkpoint: the opened target.
        format: of its bundled draft, None when detection knows none.
        root: the config's root.
        text: object with the text model's dimensions.
    """
    findings = root.findings
    keys = bundled_keys(checkpoint, format)
    if keys and format is None:
        key = min(keys)
        findings.add(
            "SD240",
            where=checkpoint.tensors[key].describe(),
            message=f"{len(keys)} tensors such as `{key}` are prediction layers in a layout that "
            "is not read",
        )
    count = read_count(root, text)
    if not keys and count is not None and count.stated and is_whole(checkpoint):
        _report_absent(checkpoint, count.field, count.stated, findings)
    return keys


def _report_absent(checkpoint: Checkpoint, field: str, stated: int, findings: Findings) -> None:
    read = {file.file for file in checkpoint.files}
    beside = [
        name
        for name in checkpoint.file_names
        if name.endswith((".safetensors", ".bin")) and name not in read and "mtp" in name.lower()
    ]
    notes = [f"`{name}` lies in the directory and no index names it" for name in beside[:1]]
    findings.add(
        "SD327",
        where=field,
        message=f"`{field.rpartition('/')[2]}` promises {stated} prediction layers and none is "
        "stored",
        expected=f"tensors of {stated} prediction layers",
        found="none",
        notes=notes,
    )

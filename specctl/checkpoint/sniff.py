"""Name what a file that is not safetensors really is, from its first bytes."""

from __future__ import annotations

from specctl.contract.findings import Findings

SNIFF_BYTES = 512

# (prefix, what it is); compared after leading white space is dropped, lower case for text.
_TEXT: tuple[tuple[bytes, str], ...] = (
    (b"<!doctype", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML answer"),
    (b'{"', "a JSON text"),
    (b"{", "a JSON text"),
    (b"access denied", "an error message of a server"),
    (b"entry not found", "an error message of a server"),
    (b"invalid credentials", "an error message of a server"),
)
_BINARY: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (PyTorch `.bin`/`.pt` files are zip archives)"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x93NUMPY", "a numpy file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
)


def content_name(head: bytes) -> str | None:
    """Return a phrase for known foreign content, None when the bytes say nothing."""
    for prefix, name in _BINARY:
        if head.startswith(prefix):
            return name
    text = head.lstrip()[:64].lower()
    for prefix, name in _TEXT:
        if text.startswith(prefix):
            return name
    return None


def report_foreign(head: bytes, size: int, *, file: str, findings: Findings) -> bool:
    """Report SD105, SD106 or SD107 when `head` explains itself; False when it does not.

    Args:
        head: the first `SNIFF_BYTES` bytes, or fewer.
        size: bytes of the whole file.
        file: place for diagnostics.
        findings: receives the diagnostic.
    """
    if head.startswith(b"version https://git-lfs"):
        stated = next(
            (line[5:] for line in head.split(b"\n") if line.startswith(b"size ")), b""
        ).decode("ascii", "replace")
        findings.add(
            "SD105",
            where=file,
            message=f"a Git LFS pointer of {size} bytes instead of the weights",
            expected=f"{stated} bytes" if stated.isdigit() else None,
            found=f"{size} bytes",
        )
        return True
    if head and not head.strip(b"\x00"):
        findings.add(
            "SD107",
            where=file,
            message=f"the first {len(head)} of {size} bytes are zero; there is no header",
        )
        return True
    name = content_name(head)
    if name is None:
        return False
    findings.add(
        "SD106",
        where=file,
        message=f"{name}, not a weight file in the layout its name promises",
        expected="a safetensors file" if file.endswith(".safetensors") else "a PyTorch zip archive",
        found=f"{name} of {size} bytes",
    )
    return True

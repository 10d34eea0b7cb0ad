"""Files beside a draft's weights that belong into every conversion of it."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.contract.file_names import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from specctl.convert.engine import SideFile
from specctl.formats.written import Origin, Written

TOKENIZER_FILES = (
    "added_tokens.json",
    CHAT_TEMPLATE,
    "merges.txt",
    "special_tokens_map.json",
    TOKENIZER,
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "vocab.json",
)
LEGAL_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt")


def side_files(
    written: Written, file_names: tuple[str, ...], *, origin: Origin, is_bundled: bool
) -> Mapping[str, SideFile]:
    """Return name in the output -> file to copy.

    Licences go with the weights; a tokenizer only with a draft that has its own directory, as that
    of a bundled draft is its target's.

    Args:
        written: what the format's writer adds.
        file_names: of the directory that the draft was read from.
        origin: whose directory that is.
        is_bundled: the draft was read out of a target.
    """
    usual = LEGAL_FILES if is_bundled else (*LEGAL_FILES, *TOKENIZER_FILES)
    names = {name: name for name in usual if name in file_names}
    names |= {out: source for source, out in written.copied_files.items() if source in file_names}
    return {out: SideFile(origin=origin, name=source) for out, source in sorted(names.items())}

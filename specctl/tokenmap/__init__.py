"""Token maps: which target ids a reduced draft vocabulary holds, from counted text.

Imports neither torch nor numpy; `tokenizers` is imported when a tokenizer is loaded.
"""

from __future__ import annotations

from specctl.tokenmap.files import read_token_map
from specctl.tokenmap.writing import write_token_map

__all__ = ["read_token_map", "write_token_map"]

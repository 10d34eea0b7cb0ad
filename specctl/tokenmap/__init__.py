"""Token maps: which target ids a reduced draft vocabulary holds, from counted text.

Reading a map is light; `writing` writes one, and only `scan`, `encoding` and `columnar` import
numpy and pyarrow, on demand. `tokenizers` is imported when a tokenizer is loaded, torch never.
"""

from __future__ import annotations

from specctl.tokenmap.files import read_token_map

__all__ = ["read_token_map"]

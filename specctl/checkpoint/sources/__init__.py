"""Where the files of a checkpoint lie: a directory of this machine, or a repository of a hub.

Invariants: everything above reads through `FileStore` and never asks which kind it has; hub clients
are imported only when a hub is read.
"""

from __future__ import annotations

from specctl.checkpoint.sources.local import LocalStore
from specctl.checkpoint.sources.store import FileStore, StoredFile

__all__ = ["FileStore", "LocalStore", "StoredFile"]

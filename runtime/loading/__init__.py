"""From a manifest to models: the files it points to, checked against its facts, read once."""

from __future__ import annotations

from runtime.loading.draft import read_draft
from runtime.loading.load import LoadedModels, load_models
from runtime.loading.target import read_target

__all__ = ["LoadedModels", "load_models", "read_draft", "read_target"]

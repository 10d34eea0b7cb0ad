"""The bytes that a step of the target has to read at least, from the manifest's sizes.

    bytes = layers + head + requests x context x (bytes of keys and values per token)

Layers and head count once however many requests or rows a step has; rows of the embedding and
activations are left out (below one percent). Sizes are those of the dtype that is served.
"""

from __future__ import annotations

import torch

from runtime.config import RuntimeConfig
from runtime.config.memory import kv_block_bytes, weight_bytes
from specctl.contract.manifest import Manifest


def weight_bytes_per_step(manifest: Manifest, dtype: torch.dtype) -> int:
    """Return the bytes of layers and head; a tied head is the embedding."""
    total = weight_bytes(manifest, dtype, with_draft=False)
    if manifest.target.is_head_tied:
        return total
    stored, embedding = _stored(manifest), manifest.parallel.embedding_bytes
    return total - total * embedding // stored


def kv_bytes_per_token(manifest: Manifest, config: RuntimeConfig) -> int:
    """Return the bytes of keys and values of one token, all layers of the target."""
    size = config.kv_block_size
    return kv_block_bytes(manifest, config.dtype, kv_block_size=size, with_draft=False) // size


def _stored(manifest: Manifest) -> int:
    parts = manifest.parallel
    return parts.embedding_bytes + parts.head_bytes + sum(parts.layer_bytes)

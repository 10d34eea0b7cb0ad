"""The engine: it reads a manifest and the tensors it points to, and serves them."""

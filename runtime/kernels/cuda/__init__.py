"""Triton kernels and their launchers; needs triton, imported only when a CUDA tensor arrives.

A launcher also runs on CPU tensors under TRITON_INTERPRET=1, which is how the tests enter it.
Arguments that follow the batch (row counts, segment counts) are never specialised: one binary per
pinned configuration serves every batch.
"""

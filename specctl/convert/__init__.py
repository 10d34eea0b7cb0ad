"""Write checkpoints: from one dialect to another, or made canonical in its own.

Invariants: tensor bytes are copied, never re-encoded; memory does not grow with the checkpoint; an
output appears whole or not at all; sources are only read. Writers of `specctl.formats` say what is
written, this package moves the bytes.
"""

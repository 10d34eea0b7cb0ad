"""The shared leaf: manifest schema and codec, diagnostics and their codes, vocabulary maps."""

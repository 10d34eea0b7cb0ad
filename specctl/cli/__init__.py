"""Typer commands (thin), one output module, one renderer of diagnostics."""

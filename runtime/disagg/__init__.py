"""Prefill and decode in different processes: what they agree on, what travels, and how."""

from __future__ import annotations

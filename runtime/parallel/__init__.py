"""Pipeline and tensor parallelism below the engine: who is where, and what ranks exchange."""

from __future__ import annotations

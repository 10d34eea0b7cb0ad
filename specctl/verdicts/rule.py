"""The shape of the table: a rule, the facts it may ask, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from specctl.draft import DraftCheckpoint, TargetCheckpoint

Engine = Literal["vllm", "sglang", "tensorrt-llm"]
Outcome = Literal["loads", "wrong", "refused"]
Verdict = Literal["loads", "wrong", "refused", "unknown"]

# What was read for each engine, oldest first; a rule's versions are among these.
ENGINES: Mapping[Engine, str] = MappingProxyType(
    {
        "vllm": "sources of releases 0.24.0, 0.26.0, 0.28.0, 0.30.0 and 0.33.0",
        "sglang": "sources of releases 0.5.16 and 0.5.23",
        "tensorrt-llm": "main at 00679c66 (2026), PyTorch backend",
    }
)
NEWEST: Mapping[Engine, str] = MappingProxyType(
    {"vllm": "0.33.0", "sglang": "0.5.23", "tensorrt-llm": "00679c66"}
)


# Algorithms whose loading code was read; a draft of another one, met by no rule, is `unknown`.
EXAMINED: Mapping[Engine, frozenset[str]] = MappingProxyType(
    {
        "vllm": frozenset(
            ("eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp", "medusa")
        ),
        "sglang": frozenset(("eagle", "eagle3", "dflash", "dflash2", "dspark")),
        "tensorrt-llm": frozenset(("eagle3",)),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a rule may ask: the draft as read, its config as stored, and the target if given."""

    draft: DraftCheckpoint
    target: TargetCheckpoint | None

    def top(self, key: str) -> object:
        """Return a top-level config field, None when absent."""
        return self.draft.config.get(key)

    def nested(self, *path: str) -> object:
        """Return a nested config field, None when any part of the path is absent."""
        value: object = self.draft.config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def is_speculators(self) -> bool:
        """Tell whether the draft is in a Speculators dialect."""
        return isinstance(self.top("speculators_model_type"), str)

    @property
    def is_reduced(self) -> bool:
        """Tell whether the draft proposes over a part of the target's vocabulary."""
        return self.draft.map_kind == "reduced"

    @property
    def target_num_layers(self) -> int | None:
        """Return the target's layer count, as given or as the draft's config states it."""
        if self.target is not None:
            return self.target.num_layers
        stated = self.top("num_target_layers")
        return stated if isinstance(stated, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row of the table.

    Args:
        name: stable, `<engine>-<what>`.
        engine: whose behaviour it is.
        outcome: what happens.
        versions: releases for which it was read, in words.
        is_current: it holds in the newest release that was read.
        applies: whether the draft meets it.
        reason: what the engine does, one sentence.
        source: file of the engine, pull request or issue.
    """

    name: str
    engine: Engine
    outcome: Outcome
    versions: str
    is_current: bool
    applies: Callable[[Facts], bool]
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineVerdict:
    """What is known of one engine.

    Args:
        engine: name.
        outcome: the worst of the rows that hold in the newest release read; without any, `loads`
            if the draft's algorithm was examined there, else `unknown`.
        version: that release.
        checked_on: everything that was read.
        rows: the rules that the draft meets, worst first; those of older releases only, too.
    """

    engine: Engine
    outcome: Verdict
    version: str
    checked_on: str
    rows: tuple[Rule, ...]

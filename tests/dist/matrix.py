"""The 80-prompt matrix: SmolLM2 and its drafts over every layout, compared with one process.

    python -m tests.dist.matrix --out DIR [--device cuda --dtype bfloat16] [ARM ...]

Each arm is a file of DIR, so a run that was cut short goes on where it stopped; the reference of a
draft is computed once. A table is printed; the status is 1 when an arm differs from its reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specctl.contract.diagnostics import DiagnosticError
from tests.dist.matrix_layouts import LAYOUTS, PARAMS, Answers, Settings, manifest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An arm beside its reference.

    Args:
        reference: the arm that it is compared with.
        num_equal: prompts with the same ids.
        first_difference: prompt and position; None: there is none.
        accept_lengths: of the reference and of the arm.
        has_equal_rounds: whether rounds and accepted drafts are equal, where they must be.
        seconds: of the reference and of the arm.
    """

    arm: str
    reference: str
    num_equal: int
    num_prompts: int
    first_difference: tuple[int, int] | None
    accept_lengths: tuple[float, float]
    has_equal_rounds: bool
    seconds: tuple[float, float]

    @property
    def is_equal(self) -> bool:
        """Whether tokens are equal, and rounds where they must be."""
        return self.num_equal == self.num_prompts and self.has_equal_rounds

    def row(self) -> str:
        """Return a line of the table."""
        one, other = self.accept_lengths
        where = "" if self.first_difference is None else f" (first: {self.first_difference})"
        return (
            f"| {self.arm.replace(':', ' | ')} | {self.num_equal}/{self.num_prompts}{where} "
            f"| {other:.4f} | {one:.4f} | {self.seconds[1]:.0f} | {self.seconds[0]:.0f} |"
        )


ARMS = (
    *("eagle3:pp2:greedy", "eagle3:pd:greedy", "eagle3:pd-pp2:greedy", "eagle3:pp2:seeded"),
    *("eagle3:pd:seeded", "dspark:pp2:greedy", "mtp:pp4:greedy", "eagle3:pd-pp2:seeded"),
    *("dspark:pp2:seeded", "mtp:pp4:seeded", "dspark:pd:greedy", "mtp:pd:greedy"),
    *("eagle3:tp3:greedy", "eagle3:tp3:seeded", "eagle3:pp2-in-process:greedy"),
)
"""Draft, layout and sampling of each arm, the most telling ones first."""


class Folder:
    """Answers that were kept."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Keep them in `path`, made on demand."""
        self._path = path
        self._settings = settings
        path.mkdir(parents=True, exist_ok=True)

    def answers(self, arm: str) -> Answers:
        """Return an arm's answers, computed when they are not there."""
        settings = self._settings
        numbers = f"{settings.num_prompts}x{settings.num_tokens}"
        name = f"{arm.replace(':', '_')}_{settings.device}_{settings.dtype}_{numbers}"
        kept = self._path / f"{name}.json"
        if not kept.exists():
            draft, layout, sampling = arm.split(":")
            with tempfile.TemporaryDirectory() as directory:
                manifest = manifest_of(Path(directory), draft)
                found = LAYOUTS[layout](manifest, settings, PARAMS[sampling])
            kept.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return Answers(**json.loads(kept.read_text("utf-8")))

    def outcome(self, arm: str) -> Outcome:
        """Compare an arm with its reference and keep what was found."""
        draft, layout, sampling = arm.split(":")
        reference = f"{draft}:{'tp3-alone' if layout == 'tp3' else 'one'}:{sampling}"
        expected, found = self.answers(reference), self.answers(arm)
        pairs = list(zip(expected.ids_target, found.ids_target, strict=True))
        unequal = [number for number, (one, other) in enumerate(pairs) if one != other]
        rounds = (expected.num_rounds, found.num_rounds)
        accepted = (expected.num_accepted_drafts, found.num_accepted_drafts)
        return Outcome(
            arm=arm,
            reference=reference,
            num_equal=len(pairs) - len(unequal),
            num_prompts=len(pairs),
            first_difference=None if not unequal else (unequal[0], _first(*pairs[unequal[0]])),
            accept_lengths=(expected.accept_length, found.accept_length),
            has_equal_rounds=layout == "tp3"
            or (rounds, accepted) == (rounds[:1] * 2, accepted[:1] * 2),
            seconds=(expected.seconds, found.seconds),
        )


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position at which two answers differ."""
    shared = min(len(one), len(other))
    return next((index for index in range(shared) if one[index] != other[index]), shared)


COLUMNS = (
    *("draft", "layout", "sampling", "prompts equal", "accept length", "of its reference"),
    *("s", "s of its reference"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run arms and print the table."""
    parser = argparse.ArgumentParser(prog="tests.dist.matrix")
    parser.add_argument("arms", nargs="*", default=ARMS, help="draft:layout:sampling")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--minutes", type=float, help="no arm starts after that")
    given = parser.parse_args(arguments)
    settings = Settings(
        device=given.device,
        dtype=given.dtype,
        num_prompts=given.prompts,
        num_tokens=given.tokens,
        concurrency=given.concurrency,
    )
    folder = Folder(given.out, settings)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n")
    is_equal = True
    for arm in given.arms:
        if end is not None and time.monotonic() > end:
            sys.stdout.write(f"not run, out of time: {arm}\n")
            continue
        try:
            outcome = folder.outcome(arm)
        except (DiagnosticError, RuntimeError, AssertionError):  # the other arms say more
            traceback.print_exc()
            sys.stdout.write(f"failed: {arm}\n")
            is_equal = False
            continue
        is_equal = is_equal and outcome.is_equal
        sys.stdout.write(outcome.row() + "\n")
        sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())

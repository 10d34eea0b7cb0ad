"""The tests' side of `speculators_worker`: ask the library, and judge a load strictly."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WORKER = Path(__file__).with_name("speculators_worker.py")

# Parameters that the library fills from the target or computes; no file holds them.
FILLED = ("verifier_lm_head.weight", "verifier_norm.weight")


class LibraryError(AssertionError):
    """The library refused what it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """What the library made of a checkpoint.

    Args:
        type: class of the model.
        missing: parameters without a key in the file, without those that the library fills.
        unexpected: keys of the file without a parameter.
        mismatched: keys whose shape is another.
        not_finite: parameters with NaN or infinity after loading.
        zero: matrices that are all zero after loading.
        digests: parameter -> digest of its bytes.
    """

    type: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    not_finite: tuple[str, ...]
    zero: tuple[str, ...]
    digests: dict[str, str]

    def assert_strict(self) -> None:
        """Fail unless every key found its parameter and every parameter its key."""
        assert not self.missing
        assert not self.unexpected
        assert not self.mismatched
        assert not [name for name in self.not_finite if name not in FILLED]
        assert not [name for name in self.zero if name not in FILLED]


class Library:
    """A process with Speculators, asked one thing after another."""

    def __init__(self, python: str) -> None:
        """Start the process; the first answer waits for the import."""
        self._process = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def load(self, directory: Path | str, *, may_miss: tuple[str, ...] = ()) -> LoadedModel:
        """Load a checkpoint.

        Args:
            directory: a Speculators checkpoint whose `verifier.name_or_path` exists.
            may_miss: parameters that this type takes from the target.
        """
        found = self._ask("load", directory=str(directory))
        keys, parameters = set(found["keys"]), set(found["shapes"])
        return LoadedModel(
            type=found["type"],
            missing=tuple(sorted(parameters - keys - {*FILLED, *may_miss})),
            unexpected=tuple(sorted(keys - parameters)),
            mismatched=tuple(found["mismatched"]),
            not_finite=tuple(found["not_finite"]),
            zero=tuple(found["zero"]),
            digests=found["digests"],
        )

    def trace(self, directory: Path | str) -> dict[str, Any]:
        """Return `digest` of every module's output, `shape` and `logits` of one forward pass."""
        return self._ask("trace", directory=str(directory))

    def blocks(self, directory: Path | str, anchors: list[int]) -> dict[str, Any]:
        """Return `base`, `corrected` and `confidence` of the blocks at the anchors."""
        return self._ask("blocks", directory=str(directory), anchors=anchors)

    def rollouts(self, directory: Path | str, anchors: list[int], depths: int) -> torch.Tensor:
        """Return float32 logits [anchors, depths, R] of a P-EAGLE draft's rollouts."""
        answer = self._ask("rollouts", directory=str(directory), anchors=anchors, depths=depths)
        return torch.tensor(answer["logits"])

    def build(self, directory: Path, config: dict[str, Any], ids: list[int] | None = None) -> str:
        """Let the library build, fill and save a model; return its class."""
        name = self._ask("build", directory=str(directory), config=config, ids=ids)["type"]
        assert isinstance(name, str)
        return name

    def convert(
        self, directory: Path, output: Path, *, target: Path, algorithm: str, **kwargs: Any
    ) -> None:
        """Run the library's own converter."""
        self._ask(
            "convert",
            directory=str(directory),
            output=str(output),
            target=str(target),
            algorithm=algorithm,
            kwargs=kwargs,
        )

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, operation: str, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"operation": operation, **request}) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, "the worker ended; does its Python have speculators 0.9.0?"
        answer = json.loads(line)
        if "error" in answer:
            raise LibraryError(f"{answer['error']}\n{answer['trace']}")
        found = answer["ok"]
        assert isinstance(found, dict)
        return found

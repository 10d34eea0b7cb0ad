"""How two implementations' logits differ, summed over prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class LogitFigures:
    """Errors against float32, flipped argmaxes and perplexities of ours and transformers' bf16."""

    def __init__(self) -> None:
        self._errors = {name: _Error() for name in ("ours_to_float32", "theirs", "between")}
        self._losses = dict.fromkeys(("ours", "transformers_bf16", "transformers_float32"), 0.0)
        self._predicted = 0
        self._rows = 0
        self._flips: list[dict[str, float]] = []

    def add(
        self, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Add one text: fp32 logits [N, V] of ours, transformers' bf16 and float32."""
        self._errors["ours_to_float32"].add(ours, exact)
        self._errors["theirs"].add(theirs, exact)
        self._errors["between"].add(ours, theirs)
        self._rows += len(tokens)
        self._predicted += len(tokens) - 1
        for name, logits in zip(self._losses, (ours, theirs, exact), strict=True):
            loss = functional.cross_entropy(logits[:-1].double(), tokens[1:], reduction="sum")
            self._losses[name] += float(loss)
        mine, other = ours.argmax(-1), theirs.argmax(-1)
        for row in torch.nonzero(mine != other).flatten().tolist():
            margin = float((exact[row, other[row]] - exact[row, mine[row]]).abs())
            self._flips.append({"row": row, "float32_margin": margin})

    def report(self) -> dict[str, Any]:
        """Return the figures as JSON-able values."""
        perplexity = {
            name: float(torch.tensor(loss / self._predicted, dtype=torch.float64).exp())
            for name, loss in self._losses.items()
        }
        return {
            "rows": self._rows,
            "ours_to_float32": self._errors["ours_to_float32"].report(),
            "transformers_bf16_to_float32": self._errors["theirs"].report(),
            "ours_to_transformers_bf16": self._errors["between"].report(),
            "perplexity": perplexity,
            "num_argmax_flips": len(self._flips),
            "largest_flip_margin": max((f["float32_margin"] for f in self._flips), default=0.0),
            "argmax_flips": self._flips,
        }


class _Error:
    def __init__(self) -> None:
        self.largest = 0.0
        self.total = 0.0
        self.count = 0

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        error = (left - right).abs()
        self.largest = max(self.largest, float(error.max()))
        self.total += float(error.double().sum())
        self.count += error.numel()

    def report(self) -> dict[str, float]:
        return {"max": self.largest, "mean": self.total / self.count}

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
        self._flips = {name: list[float]() for name in ("ours", "transformers_bf16")}
        self._num_disagreements = 0

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
        best = exact.argmax(-1)
        for name, logits in zip(self._flips, (ours, theirs), strict=True):
            chosen = logits.argmax(-1)
            rows = torch.nonzero(chosen != best).flatten()
            margins = exact[rows, best[rows]] - exact[rows, chosen[rows]]
            self._flips[name] += margins.tolist()
        self._num_disagreements += int((ours.argmax(-1) != theirs.argmax(-1)).sum())

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
            "argmax_differs_between_them": self._num_disagreements,
            "argmax_flips_to_float32": {
                name: {
                    "count": len(margins),
                    "largest_margin": max(margins, default=0.0),
                    "margins": sorted(round(margin, 3) for margin in margins),
                }
                for name, margins in self._flips.items()
            },
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

"""Show what a block draft read with the wrong anchor layout looks like: accept length collapses.

Usage: python docs/benchmarks/wrong_anchor.py DRAFT [--tokens N] [--output FILE.svg]

DRAFT is a DSpark draft of SmolLM2-135M-Instruct; the target is that of `fixtures/smollm2.py`. The
first eight MT-Bench turns are answered on the CPU in float32 with the layout that the manifest
states and with the other one (`--force-anchor-layout`), greedily, with the same number of drafts.
The answers must be equal; the share of rounds in which each draft was accepted is drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "fixtures"))

PICTURE = ROOT / "docs" / "explanation" / "wrong_anchor.svg"
PROMPTS = ROOT / "fixtures" / "prompts" / "smollm2_mt_bench_first8_ids.json"
COLOURS = ("#1f6feb", "#d1570f")
WIDTH, HEIGHT, LEFT, TOP, BASE = 640, 300, 56, 84, 250


class Reading(NamedTuple):
    """One layout's figures."""

    layout: str
    num_drafts: int
    rounds: int
    accepted: int
    per_position: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def accept_length(self) -> float:
        """Committed tokens of a round."""
        return 1 + self.accepted / self.rounds


def read_as(manifest: Path, layout: str | None, *, max_tokens: int) -> Reading:
    """Answer the prompts with a layout, None for the manifest's."""
    from runtime.config import Overrides
    from runtime.engine.llm import LLM
    from runtime.engine.request import RequestInput

    overrides = Overrides(device="cpu", max_num_requests=8, force_anchor_layout=layout)
    llm = LLM.from_manifest(manifest, overrides)
    prompts = json.loads(PROMPTS.read_text("utf-8"))["mt_bench"]
    done = llm.generate(
        [
            RequestInput(
                request_id=str(index), prompt_ids_target=tuple(prompt), max_tokens=max_tokens
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    stats = llm.engine.stats()
    is_sampled = llm.manifest.geometry.sample_from_anchor
    return Reading(
        layout="sampled" if is_sampled else "conditioning",
        num_drafts=llm.config.num_speculative_tokens,
        rounds=stats.num_rounds,
        accepted=stats.num_accepted_drafts,
        per_position=tuple(count / stats.num_rounds for count in stats.num_accepted_at),
        answers=tuple(answer.ids_target for answer in done),
    )


def drawing(right: Reading, wrong: Reading) -> str:
    """Return the picture: a pair of bars for each draft of a round."""
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="sans-serif" font-size="13" role="img"'
    lengths = f"{right.accept_length:.2f} as trained, {wrong.accept_length:.2f} otherwise"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f"<title>Accept length by anchor layout: {lengths}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 24, "Share of rounds in which a draft is accepted", size=15),
    ]
    for row, (reading, name) in enumerate(((right, "as trained"), (wrong, "wrong layout"))):
        base = 46 + 19 * row
        label = f"{name} (slot 0 {reading.layout}): accept length {reading.accept_length:.2f}"
        parts.append(
            f'<rect x="{LEFT}" y="{base - 10}" width="11" height="11" fill="{COLOURS[row]}"/>'
        )
        parts.append(_text(LEFT + 18, base, label))
    for share in (0.0, 0.25, 0.5):
        y = _height(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="#d8dee5"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{share:.0%}", anchor="end"))
    step = (WIDTH - LEFT - 20) / len(right.per_position)
    for index, shares in enumerate(zip(right.per_position, wrong.per_position, strict=True)):
        middle = LEFT + step * (index + 0.5)
        for row, share in enumerate(shares):
            x, y = middle + (row - 1) * 38, _height(share)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="36" height="{BASE - y:.1f}" '
                f'fill="{COLOURS[row]}"/>'
            )
            parts.append(_text(x + 18, y - 4, f"{share:.1%}", anchor="middle", size=11))
        parts.append(_text(middle, BASE + 18, f"draft {index + 1}", anchor="middle"))
    parts.append(
        _text(LEFT, HEIGHT - 10, f"{wrong.rounds} rounds instead of {right.rounds}", size=12)
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(share: float) -> float:
    return BASE - share / 0.6 * (BASE - TOP)


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="#1b1f24">{words}</text>'
    )


def main() -> None:
    """Run both readings and write the picture."""
    from smollm2 import target_dir

    from specctl.contract.codec import dump_manifest
    from specctl.ops.emit_manifest import emit_manifest

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=PICTURE)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.yaml"
        manifest = emit_manifest(
            str(target_dir()), str(given.draft), manifest_dir=path.parent, num_speculative_tokens=5
        )
        path.write_text(dump_manifest(manifest), encoding="utf-8")
        other = "conditioning" if manifest.geometry.sample_from_anchor else "sampled"
        right = read_as(path, None, max_tokens=given.tokens)
        wrong = read_as(path, other, max_tokens=given.tokens)
    if right.answers != wrong.answers:
        raise RuntimeError("the answers differ: the runtime is at fault, not the layout")
    for reading in (right, wrong):
        shares = " ".join(f"{share:.4f}" for share in reading.per_position)
        print(
            f"slot 0 {reading.layout}: {reading.rounds} rounds, {reading.accepted} accepted, "
            f"accept length {reading.accept_length:.3f}; by position {shares}"
        )
    print(f"answers equal: {len(right.answers)} of {len(right.answers)}")
    given.output.write_text(drawing(right, wrong), encoding="utf-8")
    print(f"wrote {given.output.name}")


if __name__ == "__main__":
    main()

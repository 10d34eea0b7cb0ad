"""Tables of `reduced_maps.py`, from the results of its boots: `report.json` and `report.md`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.bench.environment import environment_of

Boots = Mapping[str, dict[str, Any]]
TWO_POINTS = 0.02
ARMS = tuple(
    head + suffix for head in ("map-16384", "map-8192") for suffix in ("", "-rows", "-rank")
)
FACTS = ("device_name", "cpus", "torch", "triton", "python", "started", "command", "sources_digest")
WORDS = ("head", "class", "arm", "equal")
HEAD_COLUMNS = (
    "head",
    "equal",
    "accept length",
    "first 20",
    "loss of accepted drafts",
    "left out of the target's answers",
    "left out of accepted drafts",
    "loss - left out, points",
)
RESTART_COLUMNS = (
    "class",
    "accept length off",
    "on",
    "step off, ms",
    "on, ms",
    "tokens/s target alone",
    "off",
    "on",
    "on to off",
    "equal",
)
DYNAMIC_COLUMNS = (
    "class",
    "arm",
    "accept length",
    "full head's",
    "step, ms",
    "to its map alone",
    "tokens/s",
    "to the full head",
    "equal",
)


def tables(output: Path, maps: Mapping[str, Path | None], *, device: str, command: str) -> None:
    """Write both files from what the boots left."""
    boots = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((output / "boots").glob("*.json"))
    }
    where = environment_of(torch.device(device), command)
    report = {
        "environment": {name: getattr(where, name) for name in FACTS},
        "map": map_facts(output / "map.json"),
        "heads": head_figures(boots, maps),
        "restarts": restart_figures(boots),
        "dynamic": dynamic_figures(boots),
        "boots": {
            name: {key: found[key] for key in ("start_s", "graphs", "capture_s", "device_rounds")}
            for name, found in boots.items()
        },
    }
    (output / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    text = page(report)
    (output / "report.md").write_text(text, encoding="utf-8")
    print(text)


def map_facts(path: Path) -> dict[str, Any]:
    """Return what `build-token-map` said of the map."""
    if not path.is_file():
        return {}
    said = json.loads(path.read_text(encoding="utf-8"))
    built = said["maps"][0]
    return {
        "size": built["size"],
        "unseen_ids": built["num_unseen"],
        "coverage_of_outputs": built["coverage"],
        "measured_on": said["measured_on"],
        "corpus": said["corpus"],
    }


def per_round(part: Mapping[str, Any]) -> float:
    """Return accepted drafts per round."""
    return float(sum(part["accepted"]) / max(1, sum(part["rounds"])))


def left_out(kept: Iterable[int], texts: Iterable[Sequence[int]]) -> float:
    """Return the share of tokens that a map does not hold."""
    held = frozenset(kept)
    tokens = [token for text in texts for token in text]
    return sum(token not in held for token in tokens) / max(1, len(tokens))


def equal_of(part: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    same = sum(one == two for one, two in zip(part["ids"], other["ids"], strict=True))
    return f"{same}/{len(part['ids'])}"


def head_figures(boots: Boots, maps: Mapping[str, Path | None]) -> dict[str, Any]:
    """Return head -> texts equal to the target's, accept length, loss and what is left out."""
    if "target" not in boots or "heads-full" not in boots:
        return {}
    target = boots["target"]["sets"]["mt_bench"]
    full = boots["heads-full"]["sets"]["mt_bench"]
    found: dict[str, Any] = {}
    for head, path in maps.items():
        if f"heads-{head}" not in boots:
            continue
        part = boots[f"heads-{head}"]["sets"]["mt_bench"]
        first = {key: part[key][:20] for key in ("accepted", "rounds")}
        found[head] = {
            "equal": equal_of(part, target),
            "accept_length": 1 + per_round(part),
            "accept_length_first_20": 1 + per_round(first),
            "rounds": sum(part["rounds"]),
        }
        if path is not None:
            kept = json.loads(path.read_text(encoding="utf-8"))
            accepted = per_round(full)  # 0 at sizes that measure nothing
            loss = (accepted - per_round(part)) / (accepted or 1.0)
            outside = left_out(kept, target["ids"])
            found[head] |= {
                "loss": loss,
                "left_out_of_outputs": outside,
                "left_out_of_accepted": left_out(kept, [full["accepted_ids"]]),
                "is_within_two_points": abs(loss - outside) <= TWO_POINTS,
            }
    return found


def class_figures(boots: Boots, names: Sequence[str]) -> dict[str, Any]:
    """Return class -> figures over boots of one arm; a step is a round, draft and verify."""
    found = [boots[f"classes-{name}"]["sets"] for name in names if f"classes-{name}" in boots]
    target = boots.get("classes-target", {"sets": {}})["sets"]
    figures: dict[str, Any] = {}
    for name in found[0] if found else ():
        parts = [one[name] for one in found]
        rounds = sum(parts[0]["rounds"])
        steps = [statistics.median(part["decode_s"]) / rounds for part in parts]
        tokens = sum(len(ids) - 1 for ids in parts[0]["ids"])
        figures[name] = {
            "accept_length": 1 + per_round(parts[0]),
            "same_in_all_boots": all(part["accepted"] == parts[0]["accepted"] for part in parts),
            "equal": [equal_of(part, target[name]) for part in parts] if target else [],
            "step_ms": [1e3 * step for step in steps],
            "tokens_per_s": tokens / rounds / statistics.mean(steps),
        }
    return figures


def restart_figures(boots: Boots) -> dict[str, Any]:
    """Return arm -> class -> figures of the paired restarts."""
    return {
        "target": class_figures(boots, ["target"]),
        "off": class_figures(boots, ["off-1", "off-2", "off-3"]),
        "on": class_figures(boots, ["on-1", "on-2"]),
    }


def dynamic_figures(boots: Boots) -> dict[str, Any]:
    """Return arm -> class -> figures; a map of 16,384 alone is the restarts' arm `on`."""
    names = {arm: [arm] for arm in ARMS} | {"map-16384": ["on-1", "on-2"]}
    return {arm: class_figures(boots, names[arm]) for arm in ARMS}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, numbers to the right."""
    ruler = ["---" if name in WORDS else "---:" for name in columns]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ruler, *rows)] + [""]


def page(report: Mapping[str, Any]) -> str:
    """Return all tables."""
    where, counted = report["environment"], report["map"]
    lines = [f"{where['device_name']}, torch {where['torch']}, triton {where['triton']}", ""]
    if counted:
        share, unseen = counted["coverage_of_outputs"], counted["unseen_ids"]
        told = f"Map of {counted['size']} ids, {unseen} of them never counted"
        lines += [f"{told}; it covers {share:.2%} of the target's MT-Bench answers.", ""]
    lines += table(HEAD_COLUMNS, (head_row(*item) for item in report["heads"].items()))
    restarts = report["restarts"]
    lines += table(
        RESTART_COLUMNS,
        (
            restart_row(name, restarts["target"][name], off, restarts["on"][name])
            for name, off in restarts["off"].items()
            if name in restarts["on"] and name in restarts["target"]
        ),
    )
    lines += table(
        DYNAMIC_COLUMNS,
        (
            dynamic_row(name, arm, report["dynamic"], full)
            for name, full in restarts["off"].items()
            for arm in ARMS
            if name in report["dynamic"][arm] and name in report["dynamic"][map_of(arm)]
        ),
    )
    return "\n".join(lines)


def head_row(head: str, row: Mapping[str, Any]) -> list[str]:
    cells = [head, row["equal"], f"{row['accept_length']:.3f}"]
    cells.append(f"{row['accept_length_first_20']:.3f}")
    if "loss" not in row:
        return [*cells, "-", "-", "-", "-"]
    shares = (row["loss"], row["left_out_of_outputs"], row["left_out_of_accepted"])
    return [*cells, *(f"{share:.2%}" for share in shares), f"{100 * (shares[0] - shares[1]):+.2f}"]


def restart_row(name: str, alone: Any, off: Any, on: Any) -> list[str]:
    return [
        name,
        f"{off['accept_length']:.3f}",
        f"{on['accept_length']:.3f}",
        steps(off),
        steps(on),
        *(f"{one['tokens_per_s']:.1f}" for one in (alone, off, on)),
        f"{on['tokens_per_s'] / off['tokens_per_s'] - 1:+.1%}",
        " ".join([*off["equal"], *on["equal"]]),
    ]


def dynamic_row(name: str, arm: str, arms: Mapping[str, Any], full: Any) -> list[str]:
    row, base = arms[arm][name], arms[map_of(arm)][name]
    cost = statistics.mean(row["step_ms"]) / statistics.mean(base["step_ms"]) - 1
    return [
        name,
        arm,
        f"{row['accept_length']:.3f}",
        f"{full['accept_length']:.3f}",
        steps(row),
        f"{cost:+.1%}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['tokens_per_s'] / full['tokens_per_s'] - 1:+.1%}",
        " ".join(row["equal"]),
    ]


def map_of(arm: str) -> str:
    """Return the arm with the same map and nothing beside it."""
    return arm.removesuffix("-rows").removesuffix("-rank")


def steps(row: Mapping[str, Any]) -> str:
    times = row["step_ms"]
    return f"{statistics.mean(times):.3f} ({min(times):.3f}-{max(times):.3f})"

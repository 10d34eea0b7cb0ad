"""Done when: what the dialects can hold comes back byte for byte, and equal in the config.

The pairs are those of the lossless matrix of the public formats: EAGLE-3 native (SafeAILab,
SpecForge, ModelOpt, NeMo) and Speculators; z-lab DFlash and Speculators; DeepSpec, ModelOpt and
Speculators DSpark; Qwen's `mtp.` and Speculators. A Speculators file also stores embedding and
head, which come from the target when the source has none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from convert_files import CHECKPOINTS, ROOT, config_of, read_weights

from specctl.formats.registry import BY_NAME
from specctl.ops.convert import Options, convert
from specctl.ops.given import Given
from specctl.ops.load import load
from specctl.ops.normalize import normalize

EXPECTED = yaml.safe_load((ROOT / "fixtures" / "expected.yaml").read_text())
QUICK = Options(has_digests=False)
FLAT = ("safeailab-eagle3", "specforge-eagle3", "modelopt-eagle3", "nemo-eagle3")
PAIRS = [
    *((one, other) for one in FLAT for other in (*FLAT, "speculators-eagle3") if one != other),
    *(("speculators-eagle3", other) for other in FLAT),
    ("eagle", "speculators-eagle"),
    ("speculators-eagle", "eagle"),
    ("peagle", "speculators-peagle"),
    ("speculators-peagle", "peagle"),
    ("zlab-dflash", "speculators-dflash"),
    ("zlab-dflash2", "speculators-dflash2"),
    ("speculators-dflash2", "zlab-dflash2"),
    ("deepspec-dspark", "speculators-dspark"),
    ("deepspec-dspark", "modelopt-dspark"),
    ("modelopt-dspark", "deepspec-dspark"),
    ("modelopt-dspark", "speculators-dspark"),
    ("speculators-dspark", "deepspec-dspark"),
    ("qwen-mtp", "speculators-mtp"),
]
FROM_TARGET = {"embed_tokens.weight", "lm_head.weight"}
# Given on the way and not in the source; a slice keeps its target's config, which states no dtype.
FROM_OPTIONS = {"target_model_name_or_path", "num_depths", "torch_dtype"}


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_there_and_back(tmp_path: Path, first: str, second: str) -> None:
    name = f"checkpoints/{first}-clean"
    if name not in EXPECTED and first == "speculators-dspark":
        name = "checkpoints/speculators-dspark-clean"
    source = str(CHECKPOINTS / Path(name).name)
    entry = EXPECTED[name].get("target")
    target = None if entry is None else str(ROOT / "fixtures" / entry)
    normal, there, back = (str(tmp_path / name) for name in ("normal", "there", "back"))
    assert normalize(source, out=normal, target=target, options=QUICK).state == "written"
    draft = load(normal).draft
    assert draft is not None
    assert draft.format == first
    count = 3 if draft.geometry is None else draft.geometry.num_speculative_tokens
    given = Given(num_speculative_tokens=count, target_name=draft.target_name or "example/target")
    for start, to, out in ((normal, second, there), (there, first, back)):
        report = convert(
            start,
            to=to,
            out=out,
            target=target,
            given=given,
            options=QUICK,
        )
        assert [d.message for d in report.diagnostics if d.severity == "error"] == []
    assert load(there).detection.format == second
    before, after = read_weights(Path(normal)), read_weights(Path(back))
    assert {key: after.get(key) for key in before} == before
    assert set(after) - set(before) <= FROM_TARGET
    old, new = config_of(Path(normal)), config_of(Path(back))
    assert {key for key in {*old, *new} if old.get(key) != new.get(key)} <= FROM_OPTIONS


def test_every_pair_is_of_one_algorithm() -> None:
    assert all(BY_NAME[one].algorithm == BY_NAME[other].algorithm for one, other in PAIRS)

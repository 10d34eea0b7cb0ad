"""The page of `inspect --html`: its bytes, and what a real browser makes of it."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specctl.cli import app
from specctl.cli.html.page import page_text
from specctl.cli.html.vocabulary_map import bucket_counts
from specctl.contract.diagnostics import Diagnostic
from specctl.ops.inspect import Inspected, inspect_with_map
from specctl.ops.report import InspectReport, Tensor, Tensors, finding
from tests.unit.specctl.cli.chromium import Page, browser, find_chromium

ROOT = Path(__file__).parents[4]
CHECKPOINTS = "fixtures/checkpoints"
HOSTILE = "</code><script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m'\"&"
VOID = {"meta", "br", "hr", "img", "input", "link"}

# Every text must stand out from what is behind it, by the WCAG formula.
CONTRAST = """
(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => { for (let n = node; n; n = n.parentElement) {
    const color = parse(getComputedStyle(n).backgroundColor);
    if (color.length === 3 || color[3] > 0) return color; } return [255, 255, 255]; };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    if (![...node.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    if (node.closest("svg")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.tagName + " " + node.textContent.slice(0, 40)];
  }
  return worst;
})()
"""
# Shapes need 3:1 against the ground of the picture's page.
SHAPES = """
[...document.querySelectorAll("svg rect:not(.ground):not(.clear)")]
  .map(node => getComputedStyle(node).fill)
  .filter((fill, i, all) => all.indexOf(fill) === i)
"""


class Shape(HTMLParser):
    """Checks that tags nest, and keeps what is asked about later."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "action", "data", "style")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def shape_of(text: str) -> Shape:
    shape = Shape()
    shape.feed(text)
    shape.close()
    assert shape.open == []
    return shape


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def inspected(name: str, target: str | None = "hf-llama-clean") -> Inspected:
    against = None if target is None else f"{CHECKPOINTS}/{target}"
    return inspect_with_map(f"{CHECKPOINTS}/{name}", against)


def hostile() -> Inspected:
    """Return a report with the hostile text wherever a file could have put it."""
    clean = inspected("speculators-eagle3-end-id-absent")
    found = Diagnostic(
        code="SD102", severity="error", where=HOSTILE, message=HOSTILE, expected=HOSTILE,
        found=HOSTILE, help=HOSTILE, notes=(HOSTILE, "`<b>bold</b>`"),
    )  # fmt: skip
    tensors = clean.report.tensors
    listed = tuple(
        msgspec.structs.replace(tensor, key=HOSTILE, file=HOSTILE, dtype=HOSTILE)
        for tensor in tensors.list
    )
    source = msgspec.structs.replace(
        clean.report.roles.source, path=HOSTILE, architecture=HOSTILE, target_name=HOSTILE,
        evidence=(HOSTILE,),
    )  # fmt: skip
    report = msgspec.structs.replace(
        clean.report,
        roles=msgspec.structs.replace(clean.report.roles, source=source),
        tensors=msgspec.structs.replace(tensors, list=listed),
        details={HOSTILE: {HOSTILE: [HOSTILE, True, None]}},
        diagnostics=(finding(found), *clean.report.diagnostics),
    )
    return Inspected(report=report, draft_to_target=clean.draft_to_target)


def large(num_shards: int, num_layers: int) -> InspectReport:
    """Return a report of a target with many shards, to see what the picture costs."""
    report = inspected("hf-llama-clean", None).report
    listed: list[Tensor] = []
    for shard in range(num_shards):
        begin = 50_000
        for i in range(num_layers * 560 // num_shards):
            layer = (shard * 560 + i) // 560 % num_layers
            size = 14_680_064 if i % 9 else 4096
            listed.append(
                Tensor(
                    key=f"model.layers.{layer}.mlp.experts.{i}.weight",
                    role=f"layers.{layer}.gate_proj",
                    file=f"model-{shard + 1:05}-of-{num_shards:05}.safetensors",
                    shape=(2048, 7168),
                    dtype="F8_E4M3",
                    begin=begin,
                    end=begin + size,
                )
            )
            begin += size
    parts = tuple(msgspec.structs.replace(p, name="layers") for p in report.tensors.parts[:1])
    tensors = Tensors(
        num_tensors=len(listed),
        num_bytes=sum(t.end - t.begin for t in listed),
        num_files=num_shards,
        parts=parts,
        list=tuple(listed),
    )
    return msgspec.structs.replace(report, tensors=tensors)


def text_of(found: Inspected) -> str:
    return page_text(found.report, found.draft_to_target)


@pytest.mark.parametrize(
    "path", sorted(p.name for p in (ROOT / CHECKPOINTS).iterdir())[::4], ids=str
)
def test_every_kind_of_source_gives_a_page(path: str) -> None:
    found = inspected(path, None)
    text = text_of(found)
    shape = shape_of(text)
    assert not {"script", "img", "link", "iframe", "object"} & shape.tags
    assert shape.links == [], "nothing is fetched, nothing is styled in place"
    assert all(f" {item.code} {item.slug}<" in text for item in found.report.diagnostics)
    assert text == text_of(inspected(path, None)), "the same report, the same bytes"


def test_hostile_names_stay_text() -> None:
    text = text_of(hostile())
    shape = shape_of(text)
    assert not {"script", "img", "b"} & shape.tags
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_buckets_count_every_id_once() -> None:
    ids = (0, 1, 2, 9, 63, 63)
    for size, num_buckets in ((64, 256), (64, 16), (64, 10), (1_000_003, 256)):
        buckets = bucket_counts(ids, size, num_buckets)
        assert sum(count for _, _, count in buckets) == len(ids)
        assert sum(width for _, width, _ in buckets) == size
        assert len(buckets) <= num_buckets
        assert all(width > 0 for _, width, _ in buckets)


def test_numbers_of_the_map_are_on_the_page() -> None:
    text = text_of(inspected("speculators-eagle3-end-id-absent"))
    assert "24 draft ids stand for 24 of 64 target ids (37.5%)" in text
    assert "end id 1: <strong" in text
    clean = text_of(inspected("speculators-eagle3-clean"))
    assert "end id 1: draft id " in clean
    identity = text_of(inspected("speculators-eagle3-identity"))
    assert "Every target id is a draft id" in identity


def test_a_large_checkpoint_gives_a_small_page() -> None:
    text = page_text(large(163, 61), None)
    assert len(text) < 2_500_000
    assert "163" in text
    assert "more; <code>inspect --json</code>" in text
    shape_of(text)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    source = f"{CHECKPOINTS}/speculators-eagle3-clean"
    assert app.run(["inspect", source, "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"wrote {page}\n")
    assert page.read_text("utf-8") == text_of(inspect_with_map(source))
    assert app.run(["inspect", source, "--html", str(page), "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    assert app.run(["inspect", source, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err


# In a browser


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium is installed (Debian: `apt-get install chromium`)")
    profile = Path(tempfile.mkdtemp(prefix="specctl-chromium-"))
    try:
        with browser(command, profile) as tab:
            yield tab
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def show(page: Page, path: Path, text: str, width: int = 1100, scheme: str = "light") -> None:
    path.write_text(text, "utf-8")
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", media="screen", features=features)
    page.open(path)


def screenshot(page: Page, path: Path) -> bytes:
    """Write a picture of the whole page beside it, for people, and return it."""
    size = page.call("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
    shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    data = base64.b64decode(shot["data"])
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["clean", "findings", "hostile"])
def test_in_a_browser(page: Page, tmp_path: Path, name: str, scheme: str) -> None:
    found = {
        "clean": lambda: inspected("speculators-eagle3-clean"),
        "findings": lambda: inspected("speculators-eagle3-end-id-absent"),
        "hostile": hostile,
    }[name]()
    show(page, tmp_path / "page.html", text_of(found), scheme=scheme)
    requests = [event["request"]["url"] for event in page.of("Network.requestWillBeSent")]
    assert requests == [(tmp_path / "page.html").as_uri()], "one file, no request"
    assert page.of("Runtime.exceptionThrown") == []
    assert page.of("Runtime.consoleAPICalled") == []
    assert page.of("Log.entryAdded") == [], "the policy had nothing to refuse"
    assert page.evaluate("document.title").startswith("specctl inspect: ")
    assert page.evaluate("document.compatMode") == "CSS1Compat"
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, f"{ratio:.2f}:1 at {where}"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    fills = page.evaluate(SHAPES)
    assert len(fills) >= 4
    for fill in fills:
        assert contrast(fill, ground) >= 3.0, fill
    assert len(screenshot(page, tmp_path / f"{name}-{scheme}.png")) > 10_000


def contrast(first: str, second: str) -> float:
    """Return the ratio of two `rgb(...)` colors by the WCAG formula."""
    light = sorted(luminance(color) for color in (first, second))
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(color: str) -> float:
    values = [int(v) / 255 for v in color.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(v * w for v, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("width", [320, 640, 1100, 1920])
def test_nothing_hangs_out_of_the_window(page: Page, tmp_path: Path, width: int) -> None:
    for name, text in (
        ("hostile", text_of(hostile())),
        ("large", page_text(large(12, 8), None)),
    ):
        show(page, tmp_path / f"{name}.html", text, width)
        page.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name}: {wide} pixels in {width}"


def test_it_can_be_read_without_eyes(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path / "page.html", text_of(inspected("speculators-eagle3-end-id-absent")))
    nodes: list[dict[str, Any]] = page.call("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            name = node.get("name", {}).get("value", "")
            by_role.setdefault(node["role"]["value"], []).append(name)
    for landmark in ("banner", "main", "contentinfo"):
        assert len(by_role[landmark]) == 1
    assert all(by_role["image"]), "every picture has a name"
    assert len(by_role["image"]) >= 2
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(n => +n.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    unnamed = page.evaluate(
        "[...document.querySelectorAll('table')].filter(t => !t.caption || "
        "!t.querySelector('th[scope]')).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.documentElement.lang") == "en"


def test_it_prints_with_everything_unfolded(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path / "page.html", text_of(inspected("speculators-eagle3-end-id-absent")))
    height = "[...document.querySelectorAll('details')].map(n => n.offsetHeight)"
    folded = page.evaluate(height)
    page.call("Emulation.setEmulatedMedia", media="print")
    unfolded = page.evaluate(height)
    assert all(b > a + 10 for a, b in zip(folded, unfolded, strict=True)), (folded, unfolded)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    (tmp_path / "page.pdf").write_bytes(pdf)
    assert pdf.startswith(b"%PDF")

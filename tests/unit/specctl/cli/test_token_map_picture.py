"""The picture and the page: complete, one file each, legible in a browser, the same bytes again."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from specctl.cli.html.coverage_picture import coverage_svg, size_text
from specctl.cli.html.token_map_page import token_map_page
from specctl.cli.token_map_text import report_text
from specctl.ops.cut_token_map import CutOptions, cut_token_map
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap.counting import load_tokenizer
from tests.tiny_corpus import write_target
from tests.unit.specctl.cli.chromium import Page, browser, find_chromium
from tests.unit.specctl.ops.counts_samples import artefact

NAMESPACE = "{http://www.w3.org/2000/svg}"
OVERLAPS = """(() => {
  const box = document.querySelector('svg').getBoundingClientRect();
  const texts = [...document.querySelectorAll('svg text')].map(
    t => [t.textContent, t.getBoundingClientRect()]);
  const bad = [];
  texts.forEach(([name, a], i) => {
    if (a.left < box.left - 1 || a.right > box.right + 1 || a.bottom > box.bottom + 1
        || a.top < box.top - 1)
      bad.push('outside: ' + name);
    texts.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
        bad.push(name + ' / ' + other);
    });
  });
  return bad;
})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> TokenMapReport:
    directory = tmp_path_factory.mktemp("picture")
    tokenizer = load_tokenizer(write_target(directory / "target") / "tokenizer.json")
    texts = {
        f"a domain with a long name {n}": [f"the dog {n} sleeps", "def add(left)" * n]
        for n in range(1, 13)
    }
    counts = artefact(tokenizer, texts, texts, languages={"<b>&amp;": ["x"], "de": ["die Katze"]})
    options = CutOptions(sizes=(128, 160, 256), weights={}, output=directory / "map")
    return cut_token_map(counts, tokenizer, options)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium is installed")
    with browser(command, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_the_picture_stands_alone_and_is_the_same_again(report: TokenMapReport) -> None:
    text = coverage_svg(report)
    root = ET.fromstring(text)
    assert text == coverage_svg(report)
    assert not [e for e in root.iter() if e.tag in (f"{NAMESPACE}script", f"{NAMESPACE}image")]
    assert "href" not in text
    curves = root.findall(f"{NAMESPACE}polyline")
    assert len(curves) == 10  # nine slices and the speed
    words = " ".join(e.text or "" for e in root.iter(f"{NAMESPACE}text"))
    assert "and 6 more in the table" in words
    assert f"{report.recommended.size:,} ids" in words


def test_the_page_has_every_slice_and_every_number_of_the_model(report: TokenMapReport) -> None:
    text = token_map_page(report)
    assert text == token_map_page(report)
    for part in report.slices[1:]:
        assert part.name in text or "&lt;b&gt;&amp;amp;" in text
    assert "<b>" not in text
    for origin in report.cost.origins.values():
        assert origin in text
    for built in report.maps:
        assert f"{built.coverage:.2%}" in text


def test_the_text_fits_its_columns(report: TokenMapReport) -> None:
    lines = report_text(report, width=100, color=False).splitlines()
    table = [line for line in lines if line.lstrip().startswith(("128", "256", "321"))]
    assert len(table) == 3
    assert all(len(line) <= 100 for line in table)
    assert size_text(32768) == "32k"
    assert size_text(33664) == "33,664"


def test_words_in_the_picture_do_not_touch_each_other(
    report: TokenMapReport, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "coverage.svg"
    path.write_text(coverage_svg(report))
    page.open(path)
    assert page.evaluate(OVERLAPS) == []


def test_the_page_asks_for_nothing_and_runs_nothing(
    report: TokenMapReport, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(token_map_page(report))
    page.open(path)
    requests = [event["request"]["url"] for event in page.of("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("file:")] == []
    assert page.of("Log.entryAdded") == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth") is True
    assert page.evaluate("document.querySelectorAll('figure svg').length") == 1

"""The page: what it says, that it asks nothing of the network and no name breaks it, and how a browser shows it."""

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import NVFP4, black_box, change, fake_quant_run, next_code, reference_run

from fp4ep.parity import html, pictures
from fp4ep.parity.compare import STAGES, Comparison, compare
from fp4ep.parity.html import page, write_page
from fp4ep.parity.problem import Layer, Problem
from fp4ep.parity.run import Run
from fp4ep.parity.summary import beside, firsts, name_of, verdict
from fp4ep.reference.moe import Intervention
from fp4ep.reference.types import Trace

pytestmark = pytest.mark.usefixtures("quick_gemms")

pytest.importorskip("matplotlib", reason="matplotlib (fp4ep[report]) is not installed")

PROBLEM = Problem(NVFP4, {"nvfp4_kperm": 64}, tokens=(6, 4), hidden=256)
HOSTILE = "<script>alert(1)</script>\"'><img src=http://x.invalid/ onerror=alert(2)>"


@dataclass(frozen=True)
class Diagnosis:
    kind: Any
    says: str


def run(hook: Intervention | None = None, layer: Layer | None = None) -> Run:
    return replace(reference_run(PROBLEM, hook, layer), side="other", source={"hardware": "a test", "torch": "1.2.3"})


@cache
def reference() -> Run:
    return reference_run(PROBLEM)


# --- comparisons, each made once ---------------------------------------------------------------------------------


def _equal() -> Comparison:
    return compare(reference(), run())


def _one_code() -> Comparison:
    return compare(reference(), run(change("requantize", "values", lambda x: next_code(x, (3, 40)))))


def _hostile() -> Comparison:
    other = run(change("fc1", "up", lambda up: up[2:5].mul_(2), rank=1))
    return compare(reference(), replace(other, side=HOSTILE, source={HOSTILE: HOSTILE}))


def _nan() -> Comparison:
    return compare(reference(), run(change("fc2", "values", lambda x: x[1, 5].fill_(torch.nan))))


def _routes() -> Comparison:
    layer = PROBLEM.build()
    ids = layer.inputs[0].topk_ids.clone()
    ids[0, 1] = ids[3, 0] = -1
    ids[2, 0] = (ids[2, 0] + 1) % 8
    inputs = (replace(layer.inputs[0], topk_ids=ids), *layer.inputs[1:])
    return compare(reference(), run(layer=replace(layer, inputs=inputs)))


def _no_tokens() -> Comparison:
    empty = reference_run(replace(PROBLEM, tokens=(0, 0)))
    return compare(empty, empty)


def _four_ranks() -> Comparison:
    wide = replace(PROBLEM, tokens=(30, 0, 21, 3), num_experts=20, top_k=4, hidden=128)
    doubled = reference_run(wide, change("requantize", "scales", lambda x: x[:, 0].mul_(2), rank=2))
    return compare(reference_run(wide), doubled)


def _black_box() -> Comparison:
    return compare(reference(), black_box(run(change("combine", "values", lambda x: x[2, 30:60].mul_(1.01), rank=1))))


def _within_a_bound() -> Comparison:
    return compare(reference(), fake_quant_run(PROBLEM))


def _outside_a_bound() -> Comparison:
    honest = fake_quant_run(PROBLEM)
    planted = change("fc2", "values", lambda x: x[3, 64:96].mul_(1.5))
    return compare(reference(), replace(honest, trace=Trace(tuple(map(planted, honest.trace)))))


MAKERS = {
    "equal": _equal,
    "one code": _one_code,
    "hostile": _hostile,
    "nan": _nan,
    "routes": _routes,
    "no tokens": _no_tokens,
    "four ranks": _four_ranks,
    "black box": _black_box,
    "within a bound": _within_a_bound,
    "outside a bound": _outside_a_bound,
}
DIAGNOSES = {"hostile": [Diagnosis(HOSTILE, HOSTILE)]}
#: Number of pictures of differences: maps of tokens and routes, histograms, bars by expert, by rank (of two tensors).
FIGURES = {"equal": 0, "no tokens": 0, "black box": 3, "routes": 4}
#: Number of pictures of the load: bars by expert and the matrix of ranks.
LOAD = {"no tokens": 0}


def figures(name: str) -> int:
    return FIGURES.get(name, 6) + LOAD.get(name, 2)


@pytest.fixture(scope="module")
def made() -> Callable[[str], tuple[Comparison, str]]:
    """A comparison by name, and its page."""
    found: dict[str, tuple[Comparison, str]] = {}

    def make(name: str) -> tuple[Comparison, str]:
        if name not in found:
            comparison = MAKERS[name]()
            found[name] = comparison, page(comparison, DIAGNOSES.get(name, []))
        return found[name]

    return make


class Reader(HTMLParser):
    """Tags with attributes, text by section heading, and tables by caption."""

    VOID = ("meta", "link", "br", "wbr", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows: list[list[str]] = []
            self.caption = ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.said += data
        if "caption" in self.open:
            self.caption += data
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        elif {"h1", "h2", "h3"} & set(self.open):
            self.headings[-1] += data


# --- what it says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_content(made, name):
    comparison, text = made(name)
    found = Reader(text)
    assert not found.open
    said = verdict(comparison)
    assert found.headings[0].split(" ", 1)[1] == said.headline
    for sentence in (said.detail, *(text for _, text in firsts(comparison)), comparison.right.side):
        assert sentence in found.said
    sections = ["Stages", "Where it differs", "Load", "Tolerance", "What ran", "Words"]
    shown = [h for h in sections if FIGURES.get(name, 6) or h != "Where it differs"]
    assert [h for h in found.headings if h in sections] == shown

    head, *rows = found.tables["Every tensor that both sides show"]
    assert head[:6] == ["stage.tensor", "elements", "differing", "allowed", "outside", "max ulps"]
    for row, t in zip(rows, comparison.tensors, strict=True):
        assert row[:5] == [name_of(t), *(f"{n:,}" for n in (t.elements, t.differing, t.allowed, t.outside))]
        assert row[8:10] == [t.holds.value, t.allowance.rung.value]

    _, *reasons = found.tables["This comparison's own"]
    assert {row[2] for row in reasons} == {t.allowance.because for t in comparison.tensors}
    _, *peers = found.tables["What tests of other projects allow a layer with NVFP4 weights"]
    assert [row[0] for row in peers] == [f"{b.peer.project}: {b.peer.test}" for b in beside(comparison)]
    _, *sides = found.tables["The two sides"]
    assert ["side", comparison.left.side, comparison.right.side] in sides
    scheme = {row[0]: row[1] for row in found.tables[f"Scheme {comparison.left.scheme}"]}
    assert scheme["fc1.core"] == "Hopper wgmma E4M3"
    assert scheme["requantize.block"] == "64"
    assert scheme["evidence"] == "verified"
    for word in ("verified", "modelled", "bounded", "bits", "order", "bound", "ulps", "outside"):
        assert word in found.said


def chain(text: str) -> dict[str, str]:
    """Stage -> what the chain of stages says of it."""
    return dict(re.findall(r"<li class=\"[\w-]+\"><b>(\w+)</b> <span>([^<]*)</span>", text))


def test_chain_of_stages(made):
    assert chain(made("equal")[1]) == dict.fromkeys(STAGES, "equal")
    assert chain(made("no tokens")[1]) == dict.fromkeys(STAGES, "empty")
    flipped = chain(made("one code")[1])
    assert [flipped[stage] for stage in STAGES[:5]] == [*["equal"] * 4, "1 outside"]
    assert chain(made("black box")[1]) == dict.fromkeys(STAGES[:-1], "not shown") | {"combine": "30 outside"}
    routes = chain(made("routes")[1])
    assert (routes["dispatch"], routes["fc1"]) == ("4 rows lost or added", "equal")
    bounded, text = made("within a bound")
    assert (
        chain(text)["activation"] == f"{next(t for t in bounded.tensors if t.stage == 'activation').differing:,} within"
    )


@pytest.mark.parametrize("name", MAKERS)
def test_figures(made, name):
    """As many as there is to see, each with a text instead and ids of its own."""
    tags = Reader(made(name)[1]).tags
    shown = [tag for tag, _ in tags if tag == "figure"]
    assert len(shown) == len([tag for tag, _ in tags if tag == "svg"]) == figures(name)
    labels = [attributes["aria-label"] for _, attributes in tags if attributes.get("role") == "img"]
    assert len(labels) == len(shown)
    assert all(labels)
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert [name for name, n in ids.items() if n > 1] == []
    used = {
        value[1:]
        for _, a in tags
        for name, value in a.items()
        if value and name in ("href", "xlink:href") and value[0] == "#"
    }
    used |= set(re.findall(r"url\(#([^)]*)\)", made(name)[1]))
    assert used <= ids.keys()


def test_tables_have_headers(made):
    for tag, attributes in Reader(made("four ranks")[1]).tags:
        assert tag != "th" or attributes["scope"] in ("row", "col")


# --- pictures ----------------------------------------------------------------------------------------------------


def test_classes(made):
    """The colour of each element: by distance, and apart where the tolerance allows it."""
    left = torch.tensor([1.0, 1, 1, 1, 1, 1]).bfloat16()
    right = (left.view(torch.int16) + torch.tensor([0, 1, 4, 5, 257, 0], dtype=torch.int16)).view(torch.bfloat16)
    right[5] = torch.nan
    nothing = torch.zeros(6, dtype=torch.bool)
    assert pictures.Part(0, left, right, nothing, None).classes.tolist() == [0, 1, 2, 3, 4, 5]
    outside = torch.tensor([False, True, True, True, True, True])
    assert pictures.Part(0, left, right, outside, None).classes.tolist() == [0, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (300, 512), (1024, 7168), (161, 300)])
def test_no_element_is_lost_in_a_map(shape):
    classes = np.zeros(shape, np.uint8)
    classes[-1, -1], classes[shape[0] // 2, shape[1] // 2] = 3, 7
    cells, rows, columns = pictures._worst(classes)
    assert cells.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    assert all(n <= most for n, most in zip(cells.shape, (160, 256), strict=True))
    assert cells[shape[0] // 2 // rows, shape[1] // 2 // columns] == 7
    assert cells[-1, -1] == (7 if shape == (1, 1) else 3)
    assert (cells > 0).sum() == (1 if shape == (1, 1) else 2)


def test_legends_count(made):
    comparison, _ = made("one code")
    tokens, routes, histogram, expert, *_ = pictures.pictures(comparison)
    output = next(t for t in comparison.tensors if name_of(t) == "combine.values")
    assert sum(int(text.split(": ")[1].replace(",", "")) for _, text in tokens.legend) == output.differing
    assert [text for _, text in routes.legend] == ["1 ulp: 1"]
    assert routes.title == "requantize.values, route rows by channel"
    assert "every 64 channels" in routes.caption
    assert [text for _, text in histogram.legend] == [
        f"outside the tolerance: {sum(t.differing for t in comparison.tensors):,}"
    ]
    first = comparison.first
    assert f"most, 1, in expert {first.expert}" in expert.alt
    rows, _ = made("routes")
    [legend] = [picture.legend for picture in pictures.pictures(rows) if "route rows" in picture.title]
    assert [text for _, text in legend] == ["row in reference only: 3", "row in other only: 1"]


def test_allowed_and_outside_are_told_apart(made):
    comparison, _ = made("outside a bound")
    fc2 = next(t for t in comparison.tensors if t.stage == "fc2")
    assert 0 < fc2.outside < fc2.differing
    counted = {"allowed": 0, "outside": 0}
    _, routes, _, expert, *_ = pictures.pictures(comparison)
    assert routes.title.startswith("fc2.values")
    for _, text in routes.legend:
        name, n = text.rsplit(": ", 1)
        counted[name.rsplit(", ", 1)[1]] += int(n.replace(",", ""))
    assert counted == {"allowed": fc2.differing - fc2.outside, "outside": fc2.outside}
    assert [text for _, text in expert.legend] == [
        f"allowed: {fc2.differing - fc2.outside:,}",
        f"outside the tolerance: {fc2.outside:,}",
    ]


def test_a_page_is_made_again_alike(made):
    comparison, text = made("one code")
    assert page(comparison, []) == text


def test_settings_of_the_reader_stay(made):
    import matplotlib

    comparison, text = made("black box")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "svg.fonttype": "path"}):
        before = matplotlib.rcParams.copy()
        assert page(comparison, []) == text
        assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


# --- nothing from outside, nothing let in ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_asks_nothing_of_the_network(made, name):
    _, text = made(name)
    for tag, attributes in Reader(text).tags:
        assert tag not in ("script", "iframe", "object", "embed", "base", "form")
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value
                assert value.startswith(("data:", "#"))
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_names_cannot_break_the_page(made):
    _, text = made("hostile")
    found = Reader(text)
    assert "<script" not in text
    assert "<img" not in text
    assert found.said.count(HOSTILE) >= 8  # title, heading, sentence, diagnosis, sources
    _, *sides = found.tables["The two sides"]
    assert [HOSTILE, "-", HOSTILE] in sides


# --- the file ----------------------------------------------------------------------------------------------------


def test_written(made, tmp_path):
    comparison, text = made("equal")
    path = tmp_path / "report.html"
    path.write_text("older")
    write_page(comparison, [], path)
    assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", [(html, "page"), (os, "replace"), (Path, "write_text")], ids=lambda b: b[1])
def test_an_older_page_stays_when_writing_fails(made, tmp_path, monkeypatch, broken):
    path = tmp_path / "report.html"
    path.write_bytes(b"older")

    def fail(*_: object, **__: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="full"):
        write_page(made("equal")[0], [], path)
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["equal", "one code"])
def test_without_matplotlib(made, tmp_path, monkeypatch, name):
    """Also where there is nothing to draw: a report that fails with the first difference helps nobody."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'fp4ep\[report\]'"):
        write_page(made(name)[0], [], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


# --- in a browser ------------------------------------------------------------------------------------------------


def missing_for_chromium() -> str | None:
    """What keeps headless Chromium from running here; None: nothing."""
    if find_spec("selenium") is None:
        return "selenium is not installed"
    for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)):
        if not any(map(shutil.which, names)):
            return f"no {names[0]} on the path"
    return None


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    reason = missing_for_chromium()
    if reason:
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium, made, tmp_path) -> Callable[..., Any]:
    """Open the page of a comparison at a width and in a colour scheme; SHOTS names a folder for screenshots."""

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Any:
        path = tmp_path / "report.html"
        path.write_text(made(name)[1], encoding="utf-8")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chromium.get(path.as_uri())
        return chromium

    return open_page


BROWSED = ("equal", "hostile", "routes", "four ranks", "outside a bound")

#: Elements that reach beyond the window, unless the box that they scroll in does not.
_BEYOND = """
const width = document.documentElement.clientWidth;
return [document.documentElement.scrollWidth > width, [...document.querySelectorAll("body *")]
  .filter(e => !e.parentElement.closest(".scroll") && e.getBoundingClientRect().right > width + 1)
  .map(e => e.outerHTML.slice(0, 80))];
"""
#: Contrast of each text with the opaque colour behind it, as in WCAG 2.
_CONTRAST = """
const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = rgb(c).map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (c.startsWith("rgb(")) return c; } return "rgb(255, 255, 255)"; };
const found = [];
for (const e of document.querySelectorAll("main *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length) continue;
  const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
  found.push([(a + .05) / (b + .05), e.textContent.trim().slice(0, 40)]);
}
return found;
"""


@pytest.mark.parametrize("name", BROWSED)
def test_browser_shows_the_page(opened, made, name):
    comparison, _ = made(name)
    driver = opened(name)
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    sent = [
        entry["message"] for entry in driver.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    addresses = [address for message in sent for address in re.findall(r'"request":\{.*?"url":"([^"]*)"', message)]
    assert addresses
    assert all(address.startswith(("file:", "data:")) for address in addresses)
    assert driver.find_element("tag name", "h1").text.endswith(verdict(comparison).headline)
    cells = driver.find_elements("css selector", "section:nth-of-type(1) tbody tr")
    assert [row.text.split()[0] for row in cells] == [name_of(t) for t in comparison.tensors]
    sizes = driver.execute_script(
        'return [...document.querySelectorAll("figure svg, figure svg image")].map(e => e.getBoundingClientRect())'
    )
    assert len(sizes) >= figures(name)
    assert all(size["width"] > 100 and size["height"] > 20 for size in sizes)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", BROWSED)
def test_nothing_reaches_beyond_the_window(opened, name, width):
    assert opened(name, width).execute_script(_BEYOND) == [False, []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", BROWSED)
def test_contrast(opened, name, scheme):
    driver = opened(name, scheme=scheme)
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(245, 246, 248)", "dark": "rgb(14, 17, 22)"}[scheme]
    found: Sequence[tuple[float, str]] = driver.execute_script(_CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []

"""report.html: a whole page for itself, whatever the model's size and however its tensors are called."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from container.layout import EXPERT_QUANTS, VQ3R
from convert.plots import WIDTH
from convert.report import make_report
from convert.report_html import report_html
from download.ledger import Origin
from tests.convert.synthetic import K3, ORIGIN, PROVENANCE, plan_of, records_of

VOID = {"meta", "br", "hr", "img", "link", "input"}
SECTIONS = [
    "Error per layer and kind", "Spread of the experts", "Outliers", "Rows", "Usage of codebook entries", "Trunk",
    "Time per step",
]  # fmt: skip
HOSTILE = '</title><script>x()</script>"on="<!--&amp;'
NUMBER = r"-?\d+(?:\.\d+)?"


class Parsed(HTMLParser):
    """A page's elements with their attributes, its texts by element; complains of what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes), tag
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def made(quant=VQ3R, **config):
    plan = plan_of(quant, **config)
    return make_report(plan, records_of(plan), PROVENANCE, ORIGIN)


PAGES = {
    "one layer": {"num_hidden_layers": 2},
    "one layer, one expert": {"num_hidden_layers": 2, "num_experts": 1, "num_experts_per_token": 1},
    "small": {},
    "no experts": {"num_hidden_layers": 2, "first_k_dense_replace": 2},
    "K3": K3,
}


@pytest.fixture(scope="module", params=PAGES)
def page(request):
    return report_html(made(**PAGES[request.param]))


def test_it_parses(page):
    parsed = Parsed(page)
    assert page.startswith("<!doctype html>")
    assert [len(parsed.of(tag)) for tag in ("html", "head", "body", "title", "h1")][:3] == [1, 1, 1]
    assert parsed.of("html") == [{"lang": "en"}]
    assert len(parsed.of("h1")) == 1
    assert {"charset": "utf-8"} in parsed.of("meta")
    assert len(page.encode()) < 1 << 20  # a whole K3 too


def test_it_needs_nothing_else(page):
    """No script, no link, no file; also none from the style sheet."""
    parsed = Parsed(page)
    assert {name for name, _ in parsed.elements} <= {
        "html", "head", "body", "meta", "title", "style", "header", "section", "footer", "h1", "h2", "h3", "p", "dl",
        "div", "dt", "dd", "ul", "li", "span", "figure", "table", "caption", "thead", "tbody", "tr", "th", "td",
        "details", "summary", "svg", "desc", "line", "rect", "circle", "polyline", "text",
    }  # fmt: skip
    names = {name for _, attributes in parsed.elements for name in attributes}
    assert not names & {"src", "href", "xlink:href", "style", "action", "data", "srcset"}
    assert not any(name.startswith("on") for name in names)
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_every_plot_has_words_and_a_table(page):
    parsed = Parsed(page)
    n_plots = len(parsed.of("svg"))
    assert page.count('role="img"><title>') == page.count("</title><desc>") == n_plots
    assert all(plot["role"] == "img" for plot in parsed.of("svg"))
    for section in re.findall(r"<section>.*?</section>", page, re.DOTALL):
        assert ("<svg" in section) <= ("<table" in section)


def test_coordinates_lie_in_the_view_box(page):
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        parsed = Parsed(svg)
        (_, (plot, *rest)) = "", [attributes for _, attributes in parsed.elements]
        height = float(plot["viewbox"].split()[3])
        assert plot["viewbox"] == f"0 0 {WIDTH} {height:.0f}"
        for attributes in rest:
            for x, y in points(attributes):
                assert 0 <= x <= WIDTH + 0.1, attributes
                assert 0 <= y <= height + 0.1, attributes
            assert all(float(attributes.get(name, 0)) >= 0 for name in ("width", "height", "r")), attributes
        assert not re.search(r"\b(nan|inf)\b", svg)


def points(attributes):
    """Every point that an element names, the far corner of a rectangle too."""
    for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2"), ("cx", "cy")):
        if x in attributes:
            yield float(attributes[x]), float(attributes[y])
    if "width" in attributes:
        yield tuple(float(attributes[at]) + float(attributes[size]) for at, size in (("x", "width"), ("y", "height")))
    for pair in attributes.get("points", "").split():
        assert re.fullmatch(f"{NUMBER},{NUMBER}", pair)
        yield tuple(map(float, pair.split(",")))


def test_texts_in_plots_stay_inside(page):
    """By a width of 7 a character, which is above what browsers draw on average."""
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        for x, anchor, text in re.findall(rf'<text x="({NUMBER})" y="{NUMBER}" text-anchor="(\w+)">([^<]*)', svg):
            width = 7 * len(text)
            left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
            assert left >= -8, text
            assert left + width <= WIDTH + 24, text


@pytest.mark.parametrize("quant", EXPERT_QUANTS.values(), ids=lambda quant: quant.fmt.name)
def test_every_part_is_there(quant):
    parsed = Parsed(report_html(made(quant, num_hidden_layers=3)))
    assert parsed.texts["h2"] == SECTIONS
    assert parsed.texts["h3"][:3] == ["gate", "up", "down"]
    assert len(parsed.of("svg")) == 9
    rows = "".join(parsed.texts["text"])
    assert f"down {quant.n_stages}" in rows
    assert f"down {quant.n_stages + 1}" not in rows


def test_a_model_without_experts_says_so():
    parsed = Parsed(report_html(made(num_hidden_layers=2, first_k_dense_replace=2)))
    assert parsed.texts["h2"] == ["Experts", "Trunk", "Time per step"]
    assert any("has no routed experts" in text for text in parsed.texts["p"])


def test_the_figures_are_those_of_the_report():
    report = made(num_hidden_layers=3)
    report["relative_error"]["layers"]["2"]["up"] = 0.98765
    report["outlier_rows"][0] |= {"row": 31337, "error": 0.87654}
    report["usage"]["1"]["down"]["bits"][0] = 7.123
    report["seconds"]["jobs"][0]["train"] = 4567.25
    page = report_html(report)
    parsed = Parsed(page)
    cells = parsed.texts["td"]
    assert {"98.77 %", "31337", "87.65 %", "4,567.25 s"} <= set(cells)
    assert any(cell.startswith("7.12 (") for cell in cells)
    assert "layer 2, up: 98.77 %" in parsed.texts["title"]
    assert any(text.startswith("layer outside, train: ") for text in parsed.texts["title"])


@pytest.mark.parametrize(
    ("repository", "revision", "source"),
    [
        ("someone/some-model", "0123abc", "someone/some-model at revision 0123abc"),
        ("someone/some-model", None, "someone/some-model"),
        (None, "0123abc", "0123abc"),
        (None, None, "a local folder"),
    ],
)
def test_it_says_where_the_source_came_from(repository, revision, source):
    plan = plan_of(num_hidden_layers=2)
    parsed = Parsed(report_html(make_report(plan, records_of(plan), PROVENANCE, Origin(repository, revision))))
    assert source in parsed.texts["td"]
    assert (repository or plan.architecture.arch) in parsed.texts["h1"][0]


def test_hostile_names_are_only_text():
    """A checkpoint's names may be anything; nothing of them becomes markup."""
    report = made(num_hidden_layers=3)
    honest = Parsed(report_html(report))
    text = json.dumps(report)
    for name in ("someone/some-model", "0123abc", "VQ3R", "embed_tokens", "numpy", "moedock", "F32"):
        text = text.replace(name, json.dumps(HOSTILE)[1:-1])
    page = report_html(json.loads(text))
    hostile = Parsed(page)
    assert [name for name, _ in hostile.elements] == [name for name, _ in honest.elements]
    assert "<script" not in page
    assert any(HOSTILE in cell for cell in hostile.texts["td"])
    assert HOSTILE in hostile.texts["h1"][0]
    assert HOSTILE in hostile.texts["title"][0]
    assert any(HOSTILE in text for text in hostile.texts["text"])


def test_the_converter_writes_it(family):
    """Byte for byte from report.json, which is all that it needs."""
    report = json.loads(family.files["report.json"])
    assert family.files["report.html"] == report_html(report).encode()

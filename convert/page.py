"""The parts of a self-contained HTML page: style sheet, tables, figures with a legend. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from convert.plots import N_COLOURS, colour

# One palette per colour scheme, told apart by most colour-blind readers (after Okabe and Ito); lines differ in
# their dashes too.
_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1c1f24; --faint: #646a73; --rule: #d9dce0;
  --raised: #f1f2f0; --k0: #0072b2; --k1: #c4520a; --k2: #00805d; --k3: #a5447b; --k4: #b07a00; --k5: #3d4852;
  --hover: #0001; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e3; --faint: #9aa1ab; --rule: #363b43;
  --raised: #1f2329; --k0: #58aee6; --k1: #f0894e; --k2: #45c79d; --k3: #e298c2; --k4: #e8b84a; --k5: #b4bcc6;
  --hover: #fff1; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0.3rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; } p { margin: 0.3rem 0 0.8rem; max-width: 46rem; }
.lead, footer { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 0.8rem; margin: 1.2rem 0; }
.tiles div { background: var(--raised); border-radius: 0.5rem; padding: 0.7rem 0.9rem; }
.tiles dt { color: var(--faint); font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
figure { margin: 0.5rem 0 0; } .wide { overflow-x: auto; } svg { display: block; width: 100%; min-width: 40rem; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--rule); } .axis { stroke: var(--faint); } .median { stroke: var(--ink); stroke-width: 1.5; }
rect { stroke: none !important; } .curve { fill: none; stroke-width: 2; } .k1.curve { stroke-dasharray: 7 3; }
.k2.curve { stroke-dasharray: 2 3; } .k3.curve { stroke-dasharray: 9 3 2 3; } .whisker { stroke-width: 1.5; }
.band { fill: transparent; } .band:hover { fill: var(--hover); }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; margin: 0.4rem 0; padding: 0; list-style: none;
  font-size: 0.9rem; }
.chip { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 0.2rem; margin-right: 0.4rem; }
details { margin: 0.4rem 0 0.8rem; } summary { cursor: pointer; color: var(--faint); font-size: 0.9rem; }
.scroll { max-height: 41rem; overflow: auto; } table { border-collapse: collapse; font-size: 0.9rem; margin: 0.4rem 0; }
caption { text-align: left; color: var(--faint); padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--faint); font-weight: 600; }
td { overflow-wrap: anywhere; } .facts td { text-align: left; }
.beside { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
"""
_COLOURS = "\n".join(
    f".k{n} {{ fill: var(--k{n}); background: var(--k{n}); stroke: var(--k{n}); }}" for n in range(N_COLOURS)
)


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_COLOURS}{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def section(title: str, meaning: str, *parts: str) -> str:
    """A heading, a sentence that says what the figures mean, and the figures."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{paragraph(meaning)}\n" + "\n".join(parts) + "\n</section>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str) -> str:
    """A few words."""
    return f"<p>{escape(text)}</p>"


def beside(*parts: str) -> str:
    """Parts side by side, where the window is wide enough."""
    return f'<div class="beside">{"".join(parts)}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names with what there is to say of each."""
    body = "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows)
    return f'<table class="facts"><tbody>\n{body}\n</tbody></table>'


def tiles(facts: Sequence[tuple[str, str]]) -> str:
    """The few numbers to see first."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="tiles">{cells}</dl>'


def figure(svg: str, legend: Sequence[str] = ()) -> str:
    """A plot below the names of its series; it scrolls sideways where the window is too narrow to read it."""
    chips = "".join(f'<li><span class="chip {colour(n)}"></span>{escape(name)}</li>' for n, name in enumerate(legend))
    names = f'<ul class="legend">{chips}</ul>' if legend else ""
    return f'<figure>{names}<div class="wide" tabindex="0">{svg}</div></figure>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its first column names the row."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Something that opens on a click: the figures of a plot as a table."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def percent(share: float) -> str:
    """A relative error in percent, small ones to two digits."""
    value = 100 * share
    return f"{value:.2f} %" if value >= 0.1 or not value else f"{value:.2g} %"


def large(n: int) -> str:
    """A count to three digits."""
    for power, name in ((12, " T"), (9, " G"), (6, " M"), (3, " k")):
        if n >= 10**power:
            return f"{n / 10**power:.3g}{name}"
    return str(n)

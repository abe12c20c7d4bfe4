"""`report.html`: a report as one self-contained page, for looking rather than reading."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from container.progress import duration, size
from convert.page import facts, figure, folded, large, page, paragraph, percent, section, table, tiles
from convert.plots import BAR_LEFT, Bar, Plot, Slots, bars, bars_height, slot_stacks
from convert.report import ORIGIN, SECONDS
from convert.report_experts import LAYER, expert_sections

Report = Mapping[str, Any]

# Seconds of one unit of a time axis, the largest first.
UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def report_html(report: Report) -> str:
    """The page. `report` is what `convert.report.make_report` made, or report.json read back."""
    if report["relative_error"]["layers"]:
        experts = expert_sections(report)
    else:
        experts = [section("Experts", f"{_name(report)} has no routed experts: all of it is trunk.")]
    parts = [_header(report), *experts, _trunk(report), _time(report), _footer(report)]
    return page(f"Conversion of {_name(report)}", parts)


def _name(report: Report) -> str:
    return str(report[ORIGIN]["repository"] or report["model"]["arch"])


def _header(report: Report) -> str:
    n_bytes, n_weights = report["bytes"], sum(report["n_weights"].values())
    mean = report["relative_error"]["mean"]
    few = [
        ("mean error of the experts", "none" if mean is None else percent(mean)),
        ("weights", large(n_weights)),
        ("size", size(n_bytes["total"])),
        ("bits per weight", f"{8 * n_bytes['total'] / n_weights:.2f}"),
        ("work, summed over threads", duration(sum(report[SECONDS]["total"].values()))),
    ]
    meaning = (
        "Errors are relative: the length of the difference between stored and original weights over the length of "
        "the original, ‖w − w′‖ / ‖w‖. The mean error is the root mean square over the layers."
    )
    title = f"<h1>Conversion of {escape(_name(report))}</h1>"
    return "\n".join(("<header>", title, paragraph(meaning), tiles(few), facts(_facts(report)), "</header>"))


def _facts(report: Report) -> list[tuple[str, str]]:
    model, n_weights, n_bytes = report["model"], report["n_weights"], report["bytes"]
    n_experts = f" with {model['n_experts_per_layer']} experts each" if model["n_expert_layers"] else ""
    return [
        ("model", f"{model['arch']}: {model['n_layers']} layers, {model['n_expert_layers']} of them{n_experts}"),
        ("source", " at revision ".join(filter(None, report[ORIGIN].values())) or "a local folder"),
        ("settings", _listed(report["settings"])),
        ("experts", f"{n_weights['experts']:,} weights in {size(n_bytes['experts'])}"),
        ("trunk", f"{n_weights['trunk']:,} weights in {size(n_bytes['trunk'])}"),
        ("codebooks", size(n_bytes["codebooks"])),
    ]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _trunk(report: Report) -> str:
    lossy = sorted((each for each in report["trunk"] if each["max"] > 0), key=lambda each: -float(each["median"]))
    parts = []
    if lossy:
        rows = [
            Bar(
                each["tensors"],
                each["min"],
                each["median"],
                each["max"],
                f"{each['tensors']}, {each['format']}: {_range(each)}",
            )
            for each in lossy
        ]
        description = f"A bar for each of {len(rows)} kinds of tensor; see the table."
        plot = Plot("Trunk errors by kind of tensor", description, bars_height(len(rows)), BAR_LEFT)
        parts.append(figure(bars(plot, rows, "relative error", percent)))
    cells = [
        (
            each["tensors"],
            each["format"],
            str(each["n_tensors"]),
            f"{each['n_weights']:,}",
            *(percent(each[key]) for key in ("min", "median", "max")),
        )
        for each in report["trunk"]
    ]
    columns = ("tensors", "format", "number", "weights", "min", "median", "max")
    exact = len(report["trunk"]) - len(lossy)
    return section(
        "Trunk",
        "Everything but the routed experts, by kind of tensor (* stands for numbers). The bar is the median, the line "
        f"reaches from the least error to the greatest. {exact} kinds, kept without any error, are in the table only.",
        *parts,
        folded("The figures", table("Relative error of the trunk", columns, cells)),
    )


def _range(each: Mapping[str, Any]) -> str:
    ends = f"{percent(each['min'])} to {percent(each['max'])}"
    return f"{each['n_tensors']} tensor(s), median {percent(each['median'])}, {ends}"


def _time(report: Report) -> str:
    total, jobs = report[SECONDS]["total"], report[SECONDS]["jobs"]
    longest = max(sum(job[step] for step in total) for job in jobs)
    unit, name = next(((unit, name) for unit, name in UNITS if longest >= unit), UNITS[-1])
    plot = Plot("Time per step", f"A stacked bar for each of {len(jobs)} jobs: {', '.join(total)}.", 260)
    series = {step: [job[step] / unit for job in jobs] for step in total}
    svg = slot_stacks(
        plot, Slots([job["job"] for job in jobs], LAYER), series, name, lambda value: f"{value:.3g} {name}"
    )
    whole = sum(total.values()) or 1.0
    rows = [(job["job"], *(f"{job[step]:,.2f} s" for step in total)) for job in jobs]
    shares = ", ".join(f"{step} {100 * seconds / whole:.0f} %" for step, seconds in total.items())
    return section(
        "Time per step",
        "Seconds of work for each layer, and for what lies outside the layers, summed over threads; with several "
        f"threads or workers less time passes. Of all: {shares}.",
        figure(svg, list(total)),
        folded("The figures", table("Seconds of work", ("job", *total), rows)),
    )


def _footer(report: Report) -> str:
    made_by = f"{_listed({report['tool']['name']: report['tool']['version']} | report['libraries'])}."
    return f"<footer>{paragraph(made_by)}</footer>"

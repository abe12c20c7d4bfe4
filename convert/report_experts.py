"""The part of `report.html` that shows the routed experts: errors per layer, expert and row, usage of entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from container.model import KINDS
from convert.bank_report import EXPERTS
from convert.page import beside, figure, folded, heading, large, paragraph, percent, section, table
from convert.plots import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Band,
    Box,
    Plot,
    Scale,
    Slots,
    curves,
    slot_boxes,
    slot_heat,
    slot_lines,
)

Report = Mapping[str, Any]

LAYER = "layer"
SPREAD = ("min", "lower_quartile", "median", "upper_quartile", "max")


def expert_sections(report: Report) -> list[str]:
    """The sections of a model with at least one layer of experts."""
    return [part(report) for part in (_layer_errors, _expert_spread, _outliers, _row_errors, _usage)]


def _layer_errors(report: Report) -> str:
    layers = report["relative_error"]["layers"]
    names = (*KINDS, EXPERTS)
    plot = Plot(
        "Error per layer and kind", f"Lines of the relative error over {len(layers)} layers: {', '.join(names)}."
    )
    series = {name: [errors[name] for errors in layers.values()] for name in names}
    svg = slot_lines(plot, Slots(list(layers), LAYER), series, "relative error", percent)
    rows = [(layer, *(percent(errors[name]) for name in names)) for layer, errors in layers.items()]
    return section(
        "Error per layer and kind",
        "Each layer has its own codebooks, one set per kind of matrix. A layer that stands out has weights which "
        "these codebooks fit worse; “experts” is all kinds together.",
        figure(svg, names),
        folded("The figures", table("Relative error", (LAYER, *names), rows)),
    )


def _expert_spread(report: Report) -> str:
    layers = report["experts"]
    slots = Slots(list(layers), LAYER)
    spreads = {kind: [layer["spread"][kind] for layer in layers.values()] for kind in KINDS}
    ends = [spread[end] for each in spreads.values() for spread in each for end in ("min", "max")]
    parts, rows = [], []
    for n, kind in enumerate(KINDS):
        plot = Plot(f"Spread of the experts, {kind}", f"A box for each of {len(layers)} layers; see the table.", 220)
        axis = Axis.of_values(ends, "relative error", percent, plot.upwards)
        boxes = [_box(layer, kind, each) for layer, each in layers.items()]
        parts += [heading(kind), figure(slot_boxes(plot, slots, boxes, axis, f"k{n}"))]
        rows += [
            (layer, kind, *(percent(spread[key]) for key in SPREAD))
            for layer, spread in zip(layers, spreads[kind], strict=True)
        ]
    columns = (LAYER, "kind", *(key.replace("_", " ") for key in SPREAD))
    return section(
        "Spread of the experts",
        "All experts of a layer share its codebooks. The box holds the middle half of them with the median as a "
        "line; the thin line reaches from the best expert to the worst.",
        *parts,
        folded("The figures", table("Relative error of the experts", columns, rows)),
    )


def _box(layer: str, kind: str, experts: Mapping[str, Any]) -> Box:
    spread, errors = experts["spread"][kind], experts["errors"][kind]
    least, greatest = (errors.index(end(errors)) for end in (min, max))
    hover = (
        f"{LAYER} {layer}, {kind}: median {percent(spread['median'])}, best {percent(spread['min'])} "
        f"(expert {least}), worst {percent(spread['max'])} (expert {greatest})"
    )
    return Box(tuple(spread[key] for key in SPREAD), hover)


def _outliers(report: Report) -> str:
    experts = [
        (str(each[LAYER]), str(each["expert"]), each["kind"], percent(each["error"]), percent(each["median"]))
        for each in report["outlier_experts"]
    ]
    rows = [
        (
            str(each[LAYER]),
            str(each["expert"]),
            each["kind"],
            str(each["row"]),
            percent(each["error"]),
            f"{each['rms']:.3g}",
        )
        for each in report["outlier_rows"]
    ]
    return section(
        "Outliers",
        "Where to look first. Experts are ranked by how far they lie above the median of their layer and kind, rows "
        "by their error; a bad row of small weights (their size is the root mean square) does little harm.",
        beside(
            table("Experts", (LAYER, "expert", "kind", "error", "layer median"), experts),
            table("Rows", (LAYER, "expert", "kind", "row", "error", "weights’ size"), rows),
        ),
    )


def _row_errors(report: Report) -> str:
    counts, width = report["row_errors"]["counts"], report["row_errors"]["bin_width"]
    filled = [n for n, rows in enumerate(zip(*counts.values(), strict=True)) if any(rows)]
    first, last = filled[0], filled[-1] + 1
    plot = Plot("Histogram of row errors", "Rows of all experts by their relative error, on a logarithmic axis.", 260)
    most = max(max(rows) for rows in counts.values())
    powers = range(math.floor(_log_count(most)) + 1)
    y_axis = Axis(
        Scale(0, _log_count(most) + 0.2, *plot.upwards),
        {float(power): large(10 ** (power - 1)) if power else "0" for power in powers},
        "rows",
    )
    x_scale = Scale(first * width, last * width, LEFT, RIGHT)
    x_axis = Axis(x_scale, {tick: f"{100 * tick:.4g} %" for tick in x_scale.ticks(10)}, "relative error of the row")
    series = [
        [(edge * width, _log_count(rows[n])) for n in range(first, last) for edge in (n, n + 1)]
        for rows in counts.values()
    ]
    hovers = [
        Band(n * width, (n + 1) * width, f"{_bin(n, width)}: " + _counted({kind: counts[kind][n] for kind in counts}))
        for n in range(first, last)
    ]
    rows = [(_bin(n, width), *(f"{counts[kind][n]:,}" for kind in counts)) for n in filled]
    return section(
        "Rows",
        "How many rows of the expert matrices have which error. The axis is logarithmic, so that a single odd row "
        "among millions shows, at the right.",
        figure(curves(plot, x_axis, y_axis, series, hovers), list(counts)),
        folded("The figures", table("Rows by error", ("error", *counts), rows)),
    )


def _log_count(count: int) -> float:
    """The height of a count: 0 for none, 1 for one, and one more with every power of ten."""
    return 1 + math.log10(count) if count else 0.0


def _bin(n: int, width: float) -> str:
    return f"{100 * n * width:.1f} to {100 * (n + 1) * width:.1f} %"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _usage(report: Report) -> str:
    layers = report["usage"]
    stages = range(len(next(iter(layers.values()))[KINDS[0]]["counts"]))
    n_entries = len(next(iter(layers.values()))[KINDS[0]]["counts"][0])
    shares = {
        f"{kind} {stage + 1}": [2 ** layer[kind]["bits"][stage] / n_entries for layer in layers.values()]
        for kind in KINDS
        for stage in stages
    }
    height = TOP + BOTTOM + 18 * len(shares)
    heat = Plot("Effective codebook use", "A cell for each layer, kind and stage; see the table.", height)
    least, greatest = min(map(min, shares.values())), max(map(max, shares.values()))
    rows = [
        (layer, kind, *(f"{bits:.2f} ({unused})" for bits, unused in zip(each["bits"], each["unused"], strict=True)))
        for layer, kinds in layers.items()
        for kind, each in kinds.items()
    ]
    n_unused = sum(unused for kinds in layers.values() for each in kinds.values() for unused in each["unused"])
    return section(
        "Usage of codebook entries",
        f"A codebook is used well when its {n_entries} entries are chosen about equally often. {n_unused:,} entries "
        "of the whole model are never chosen.",
        heading("Sorted usage, mean over layers and kinds"),
        figure(_usage_curves(layers, len(stages), n_entries), [f"stage {stage + 1}" for stage in stages]),
        heading("Effective share of the entries, by layer, kind and stage"),
        paragraph(
            "2 to the power of the entropy, over the number of entries: from "
            f"{percent(least)} (palest) to {percent(greatest)} (fullest)."
        ),
        figure(slot_heat(heat, Slots(list(layers), LAYER), shares, percent)),
        folded(
            "The figures",
            table("Bits per index (unused entries)", (LAYER, "kind", *(f"stage {n + 1}" for n in stages)), rows),
        ),
    )


def _usage_curves(layers: Mapping[str, Any], n_stages: int, n_entries: int) -> str:
    plot = Plot("Sorted usage of codebook entries", "Falling curves, one per stage; 1 is equal use.", 260)
    series = [_sorted_usage(layers, stage, n_entries) for stage in range(n_stages)]
    most = max(values[0] for values in series)
    x_scale = Scale(0, n_entries, LEFT, RIGHT)
    x_axis = Axis(x_scale, {tick: f"{tick:.0f}" for tick in x_scale.ticks(8)}, "entries, the most used first")
    y_axis = Axis.of_values([0.0, most], "use, 1 = equal", lambda value: f"{value:.3g}", plot.upwards)
    hovers = [
        Band(
            n, n + 1, f"rank {n + 1}: " + ", ".join(f"stage {k + 1} {values[n]:.2f}" for k, values in enumerate(series))
        )
        for n in range(n_entries)
    ]
    points = [[(n + 0.5, value) for n, value in enumerate(values)] for values in series]
    return curves(plot, x_axis, y_axis, points, hovers)


def _sorted_usage(layers: Mapping[str, Any], stage: int, n_entries: int) -> list[float]:
    """Uses of the entry of each rank over the mean use, averaged over the books of one stage."""
    books = [sorted(kinds[kind]["counts"][stage], reverse=True) for kinds in layers.values() for kind in KINDS]
    return [sum(book[n] * n_entries / max(1, sum(book)) for book in books) / len(books) for n in range(n_entries)]

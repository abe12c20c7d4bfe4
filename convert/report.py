"""The figures of a conversion, from the records of its jobs: what `report.json` holds and `report.html` draws.

Errors are relative, ‖w - w'‖ / ‖w‖. Everything is in the plan's order, whatever the order in which jobs ended.
`seconds` differ from run to run, and `origin` says where the source came from, which decides no byte; the rest is the
same for the same source and options.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from container.layout import CODEBOOKS_NAME, TRUNK_NAME
from container.model import KINDS
from convert.bank_report import EXPERTS, ROW_ERROR_BINS, BankFigures, rounded
from convert.build import FinishedJob
from convert.plan import ConversionPlan, JobPlan
from convert.timing import STEPS, add_seconds
from download.ledger import Origin

# Expert matrices and rows named for the whole model.
OUTLIERS = 20
SECONDS = "seconds"
ORIGIN = "origin"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

Layers = Mapping[int, BankFigures]


def make_report(
    plan: ConversionPlan, records: Mapping[str, FinishedJob], provenance: Mapping[str, Any], origin: Origin
) -> dict[str, Any]:
    """The report of a conversion whose every job has its record."""
    layers: dict[int, BankFigures] = {}
    for job in plan.jobs:
        figures = records[job.id].experts
        if job.experts is not None and figures is not None:
            layers[job.experts.layer] = figures
    found = {name: error for record in records.values() for name, error in record.trunk_errors.items()}
    trunk_errors = {entry.name: found[entry.name] for entry in plan.trunk}
    return {
        "model": _model(plan),
        ORIGIN: asdict(origin),
        "settings": dict(provenance["options"]),
        "tool": dict(provenance["tool"]),
        "libraries": dict(provenance["libraries"]),
        "n_weights": _weights(plan),
        "bytes": _sizes(plan),
        "relative_error": {
            "mean": mean_error(records),
            "layers": {str(layer): dict(figures.errors) for layer, figures in layers.items()},
            "trunk": trunk_errors,
        },
        "experts": {str(layer): _experts(figures) for layer, figures in layers.items()},
        "outlier_experts": _outlier_experts(layers),
        "outlier_rows": _outlier_rows(layers),
        "worst_rows": {str(layer): [asdict(row) for row in figures.worst_rows] for layer, figures in layers.items()},
        "row_errors": {"bin_width": 1 / ROW_ERROR_BINS, "counts": _row_errors(layers)},
        "usage": {str(layer): _usage(figures) for layer, figures in layers.items()},
        "trunk": _trunk(plan, trunk_errors),
        SECONDS: _seconds(plan, records),
    }


def mean_error(records: Mapping[str, FinishedJob]) -> float | None:
    """Root mean square of the layers' relative errors; None without expert layers."""
    errors = [record.experts.errors[EXPERTS] for record in records.values() if record.experts is not None]
    return math.sqrt(math.fsum(error * error for error in errors) / len(errors)) if errors else None


def _model(plan: ConversionPlan) -> dict[str, Any]:
    return {
        "arch": plan.architecture.arch,
        "n_layers": plan.architecture.model.n_layers,
        "n_expert_layers": len(plan.banks),
        "n_experts_per_layer": max((bank.n_experts for bank in plan.banks.values()), default=0),
    }


def _weights(plan: ConversionPlan) -> dict[str, int]:
    total = sum(job.n_weights for job in plan.jobs)
    trunk = sum(math.prod(item.tensor.shape) for item in plan.slices)
    return {"experts": total - trunk, "trunk": trunk}


def _sizes(plan: ConversionPlan) -> dict[str, int]:
    banks = sum(bank.n_bytes for bank in plan.banks.values())
    return {
        "experts": banks,
        "codebooks": plan.file_bytes[CODEBOOKS_NAME],
        "trunk": plan.file_bytes[TRUNK_NAME],
        "total": plan.total_bytes,
    }


def _experts(figures: BankFigures) -> dict[str, Any]:
    """Every expert's error by kind, and how they spread: least, quartiles and greatest."""
    errors = {kind: list(figures.expert_errors[kind]) for kind in KINDS}
    return {"errors": errors, "spread": {kind: _spread(errors[kind]) for kind in KINDS}}


def _spread(errors: Sequence[float]) -> dict[str, float]:
    quantiles = np.quantile(np.asarray(errors), (0, 0.25, 0.5, 0.75, 1))
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    return {name: rounded(float(value)) for name, value in zip(names, quantiles, strict=True)}


def _outlier_experts(layers: Layers) -> list[dict[str, Any]]:
    """The matrices whose errors lie farthest above the median of their layer and kind."""
    return heapq.nsmallest(OUTLIERS, _matrices(layers), key=lambda each: float(each["median"]) - float(each["error"]))


def _matrices(layers: Layers) -> Iterator[dict[str, Any]]:
    for layer, figures in layers.items():
        for kind in KINDS:
            median = _spread(figures.expert_errors[kind])["median"]
            for expert, error in enumerate(figures.expert_errors[kind]):
                yield {"layer": layer, "expert": expert, "kind": kind, "error": error, "median": median}


def _outlier_rows(layers: Layers) -> list[dict[str, Any]]:
    """The rows with the greatest errors."""
    rows = ({"layer": layer, **asdict(row)} for layer, figures in layers.items() for row in figures.worst_rows)
    return heapq.nsmallest(OUTLIERS, rows, key=lambda each: -float(each["error"]))


def _row_errors(layers: Layers) -> dict[str, list[int]]:
    """Rows of the whole model by kind and bin of their error."""
    counts = {kind: np.zeros(ROW_ERROR_BINS, dtype=np.int64) for kind in KINDS}
    for figures in layers.values():
        for kind in KINDS:
            counts[kind] += np.asarray(figures.row_errors[kind], dtype=np.int64)
    return {kind: values.tolist() for kind, values in counts.items()}


def _usage(figures: BankFigures) -> dict[str, Any]:
    """By kind and stage: how often each entry is chosen, how many never are, and the bits that an index carries."""
    found = {}
    for kind in KINDS:
        stages = [list(stage) for stage in figures.usage[kind]]
        found[kind] = {
            "counts": stages,
            "unused": [stage.count(0) for stage in stages],
            "bits": [rounded(_entropy(stage)) for stage in stages],
        }
    return found


def _entropy(counts: Sequence[int]) -> float:
    """-Σ p log2 p: the bits per index that an ideal code would need; 2 to that power is the perplexity."""
    total = sum(counts)
    return math.fsum(n / total * math.log2(total / n) for n in counts if n)


def _trunk(plan: ConversionPlan, errors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Trunk errors by kind of tensor: the tensors whose names differ only in numbers, and that share a format."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for item in plan.slices:
        name = item.entry.name
        key = (_NUMBER.sub("*", name), item.entry.fmt.name)
        groups.setdefault(key, []).append((math.prod(item.tensor.shape), errors[name]))
    return [
        {
            "tensors": pattern,
            "format": fmt,
            "n_tensors": len(tensors),
            "n_weights": sum(n_weights for n_weights, _ in tensors),
            **_spread([error for _, error in tensors]),
        }
        for (pattern, fmt), tensors in groups.items()
    ]


def _seconds(plan: ConversionPlan, records: Mapping[str, FinishedJob]) -> dict[str, Any]:
    """Seconds of work by job and step, summed over threads, and of all jobs."""
    total: dict[str, float] = {}
    for job in plan.jobs:
        add_seconds(total, records[job.id].seconds)
    return {
        "total": _by_step(total),
        "jobs": [{"job": _job_name(job), **_by_step(records[job.id].seconds)} for job in plan.jobs],
    }


def _by_step(seconds: Mapping[str, float]) -> dict[str, float]:
    return {step: round(seconds[step], 3) for step in STEPS}


def _job_name(job: JobPlan) -> str:
    return job.id if job.layer is None else str(job.layer)

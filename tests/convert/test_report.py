"""report.json: held against everything decoded again, and against plans of other sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from container.indices import unpack_indices
from container.layout import EXPERT_QUANTS
from container.model import KINDS
from container.reader import ContainerReader
from container.strict_json import json_bytes, parse_object
from convert.arch import detect
from convert.bank_report import BankFigures
from convert.options import ConvertOptions
from convert.provenance import LIBRARIES
from convert.report import OUTLIERS, make_report, mean_error
from tests.checkpoints import checkpoint_tensors, logical_tensor
from tests.convert import oracle
from tests.convert.small import EXPERT, convert_here, small_k3, write_small
from tests.convert.synthetic import K3, ORIGIN, PROVENANCE, plan_of, records_of

KEYS = {
    "model": {"arch", "n_layers", "n_expert_layers", "n_experts_per_layer"},
    "origin": {"repository", "revision"},
    "settings": set(ConvertOptions(source=Path("in"), output=Path("out")).shaping),
    "tool": {"name", "version"},
    "libraries": set(LIBRARIES),
    "n_weights": {"experts", "trunk"},
    "bytes": {"experts", "codebooks", "trunk", "total"},
    "relative_error": {"mean", "layers", "trunk"},
    "experts": {"1", "2"},
    "outlier_experts": {"layer", "expert", "kind", "error", "median"},
    "outlier_rows": {"layer", "expert", "kind", "row", "error", "rms"},
    "worst_rows": {"1", "2"},
    "row_errors": {"bin_width", "counts"},
    "usage": {"1", "2"},
    "trunk": {
        "tensors", "format", "n_tensors", "n_weights", "min", "lower_quartile", "median", "upper_quartile", "max",
    },
    "seconds": {"total", "jobs"},
}  # fmt: skip


def report_of(family):
    return parse_object(family.files["report.json"])


def decoded(family):
    """((layer, expert, kind), squared errors of rows, squared norms of rows, codes) of every matrix, decoded slowly."""
    architecture, tensors = detect(family.config), checkpoint_tensors(family.config)
    with ContainerReader.open(family.output) as reader:
        quant = reader.layout.quant
        for layer in reader.model.moe_layers:
            books = reader.codebooks(layer)
            for expert in range(reader.model.moe.n_experts):
                record = reader.read_expert(layer, expert)
                for n, kind in enumerate(KINDS):
                    wanted = logical_tensor(tensors, architecture.experts.source(layer, expert, kind))
                    found = oracle.decode(record.indices[kind], record.scales[kind], books[n], wanted.shape, quant)
                    wide = wanted.astype(np.float64)
                    codes = unpack_indices(record.indices[kind], wanted.shape, quant)
                    yield (
                        (layer, expert, kind),
                        np.square(found - wide).sum(axis=1),
                        np.square(wide).sum(axis=1),
                        codes.reshape(-1, quant.n_stages),
                    )


def test_its_keys(family):
    report = report_of(family)
    assert list(report) == list(KEYS)
    for key, names in KEYS.items():
        entries = report[key] if isinstance(report[key], list) else [report[key]]
        assert entries
        assert {frozenset(entry) for entry in entries} == {frozenset(names)}, key


def test_what_it_says_of_the_model(family):
    report = report_of(family)
    manifest = parse_object(family.files["manifest.json"])
    assert report["model"]["arch"] == manifest["arch"]
    assert (report["model"]["n_layers"], report["model"]["n_expert_layers"]) == (3, 2)
    assert report["settings"] == manifest["provenance"]["options"]
    assert report["libraries"] == manifest["provenance"]["libraries"]
    assert sum(report["n_weights"].values()) == family.summary.n_weights
    sizes = dict(report["bytes"])
    assert sizes.pop("total") == sum(sizes.values()) == family.summary.container_bytes
    assert sizes["trunk"] == len(family.files["trunk.bin"])
    assert report["relative_error"]["mean"] == family.summary.relative_error


def test_experts_and_rows_are_those_of_the_bank(family):
    """Every expert's error, the worst rows and the histogram, against decoding everything again."""
    report = report_of(family)
    rows = {layer: [] for layer in report["worst_rows"]}
    histogram = {kind: np.zeros(500, np.int64) for kind in KINDS}
    for (layer, expert, kind), squared, norm, _ in decoded(family):
        found = report["experts"][str(layer)]["errors"][kind][expert]
        assert found == pytest.approx(math.sqrt(squared.sum() / norm.sum()), rel=1e-4)
        errors = np.sqrt(squared / norm)
        rms = np.sqrt(norm / norm_width(family, kind))
        rows[str(layer)] += [(errors[n], expert, kind, n, rms[n]) for n in range(len(errors))]
        histogram[kind] += np.histogram(errors, np.arange(501) / 500)[0]
    for layer, found in report["worst_rows"].items():
        expected = sorted(rows[layer], key=lambda row: -row[0])[: len(found)]
        assert len(found) == 10
        for row, (error, expert, kind, n, rms) in zip(found, expected, strict=True):
            assert (row["expert"], row["kind"], row["row"]) == (expert, kind, n)
            assert (row["error"], row["rms"]) == pytest.approx((error, rms), rel=1e-3)
    for kind in KINDS:
        counts = np.asarray(report["row_errors"]["counts"][kind])
        # the encoder's own sums differ in the last digits, so a row may stand on the other side of an edge
        assert np.abs(np.cumsum(counts) - np.cumsum(histogram[kind])).max() <= 1
        assert counts.sum() == histogram[kind].sum()


def norm_width(family, kind):
    with ContainerReader.open(family.output) as reader:
        return reader.model.expert_shapes[kind][1]


def test_usage_counts_are_those_of_the_stored_indices(family):
    report = report_of(family)["usage"]
    found = {}
    for (layer, _, kind), _, _, codes in decoded(family):
        counts = np.stack([np.bincount(stage, minlength=256) for stage in codes.T])
        found[layer, kind] = found.get((layer, kind), 0) + counts
    for (layer, kind), counts in found.items():
        usage = report[str(layer)][kind]
        assert usage["counts"] == counts.tolist()
        assert usage["unused"] == (counts == 0).sum(axis=1).tolist()
        shares = np.maximum(counts / counts.sum(axis=1, keepdims=True), 1e-300)
        assert usage["bits"] == pytest.approx((-shares * np.log2(shares)).sum(axis=1), rel=1e-4)


def test_spreads_and_outliers_follow_from_the_errors(family):
    report = report_of(family)
    matrices = []
    for layer, experts in report["experts"].items():
        for kind in KINDS:
            errors = experts["errors"][kind]
            spread = list(experts["spread"][kind].values())
            assert spread == pytest.approx(np.quantile(errors, (0, 0.25, 0.5, 0.75, 1)), rel=1e-4)
            matrices += [(error - spread[2], int(layer), n, kind) for n, error in enumerate(errors)]
    expected = sorted(matrices, key=lambda each: -each[0])[:OUTLIERS]
    found = [(each["layer"], each["expert"], each["kind"]) for each in report["outlier_experts"]]
    assert found == [each[1:] for each in expected]
    worst = sorted((row["error"] for rows in report["worst_rows"].values() for row in rows), reverse=True)[:OUTLIERS]
    assert [row["error"] for row in report["outlier_rows"]] == worst


def test_trunk_errors_are_grouped_by_kind_of_tensor(family):
    report = report_of(family)
    errors = report["relative_error"]["trunk"]
    assert sum(group["n_tensors"] for group in report["trunk"]) == len(errors)
    assert sum(group["n_weights"] for group in report["trunk"]) == report["n_weights"]["trunk"]
    (group,) = (group for group in report["trunk"] if group["tensors"].endswith("layers.*.input_layernorm.weight"))
    assert (group["n_tensors"], group["format"], group["max"]) == (3, "F32", 0.0)
    (group,) = (group for group in report["trunk"] if group["tensors"].endswith("embed_tokens.weight"))
    assert group["median"] == pytest.approx(errors[group["tensors"]], rel=1e-4)


def test_seconds_are_kept_for_every_job(family):
    seconds = report_of(family)["seconds"]
    weight_map = json.loads((family.source / "model.safetensors.index.json").read_text())["weight_map"]
    outside = {shard for name, shard in weight_map.items() if "model.layers." not in name}
    expected = [f"outside-{n}" for n in range(1, len(outside) + 1)]
    assert [job["job"] for job in seconds["jobs"]] == [*expected, "0", "1", "2"]
    for step, total in seconds["total"].items():
        assert total == pytest.approx(sum(job[step] for job in seconds["jobs"]), abs=0.003)
        assert total == pytest.approx(family.summary.step_seconds[step], abs=0.003)


@pytest.mark.usefixtures("in_this_process")
def test_seconds_survive_a_resume(tmp_path, k3):
    first, _ = convert_here(k3.source, tmp_path / "out", layers=frozenset({1}))
    second, _ = convert_here(k3.source, tmp_path / "out")
    total = json.loads((tmp_path / "out" / "report.json").read_text())["seconds"]["total"]
    for step, seconds in total.items():
        assert seconds == pytest.approx(first.step_seconds[step] + second.step_seconds[step], abs=0.003)


def planted(folder, rows):
    """The report of a model in which `rows` of one matrix have weights too small for the f16 scale of a row."""
    options = {"quantization_config": None, "num_hidden_layers": 2}
    tensors = checkpoint_tensors(small_k3(**options))
    name = EXPERT.format(layer=1, expert=2, matrix="w3")
    tensors[name][rows] = tensors[name][rows] * np.asarray(1e-8, tensors[name].dtype)
    convert_here(write_small(folder / "checkpoint", tensors, **options), folder / "out")
    return parse_object((folder / "out" / "report.json").read_bytes())


@pytest.mark.usefixtures("in_this_process")
def test_a_planted_expert_is_found(tmp_path):
    worst = planted(tmp_path, slice(None))["outlier_experts"][0]
    assert (worst["layer"], worst["expert"], worst["kind"]) == (1, 2, "up")
    assert worst["error"] > 0.9


@pytest.mark.usefixtures("in_this_process")
def test_a_planted_row_is_found(tmp_path):
    report = planted(tmp_path, 5)
    worst = report["outlier_rows"][0]
    assert (worst["layer"], worst["expert"], worst["kind"], worst["row"]) == (1, 2, "up", 5)
    assert worst["error"] > 0.9
    assert worst["rms"] < 1e-8  # and it does little harm
    assert report["worst_rows"]["1"][0] == {key: value for key, value in worst.items() if key != "layer"}
    assert report["outlier_experts"][0]["error"] < 0.5


@pytest.mark.parametrize("quant", EXPERT_QUANTS.values(), ids=lambda quant: quant.fmt.name)
def test_it_does_not_depend_on_how_records_came_back(quant):
    """From a worker or from disk, where keys are sorted; in any order of jobs."""
    plan = plan_of(quant, num_hidden_layers=4, num_experts=6)
    records = records_of(plan)
    read = {}
    for job in reversed(plan.jobs):
        raw = json.loads(json.dumps(records[job.id].to_json(), sort_keys=True))
        read[job.id] = records[job.id].from_json(raw, job)
    again, expected = (make_report(plan, each, PROVENANCE, ORIGIN) for each in (read, records))
    assert json_bytes(again) == json_bytes(expected)


def test_without_experts():
    plan = plan_of(num_hidden_layers=2, first_k_dense_replace=2)
    records = records_of(plan)
    report = make_report(plan, records, PROVENANCE, ORIGIN)
    assert mean_error(records) is None
    assert report["relative_error"]["mean"] is None
    assert report["n_weights"]["experts"] == report["model"]["n_expert_layers"] == 0
    assert report["outlier_experts"] == report["outlier_rows"] == []
    assert sum(map(sum, report["row_errors"]["counts"].values())) == 0
    assert json_bytes(report)


def test_of_a_whole_k3():
    """Tens of megabytes at most, seconds to make, and the planted expert first among a quarter of a million."""
    plan = plan_of(**K3)
    records = records_of(plan)
    figures = records["L60"].experts
    errors = {kind: list(figures.expert_errors[kind]) for kind in KINDS}
    errors["down"][895] = 0.5
    records["L60"] = replace(records["L60"], experts=replace(figures, expert_errors=errors))
    report = make_report(plan, records, PROVENANCE, ORIGIN)
    worst = report["outlier_experts"][0]
    assert (worst["layer"], worst["expert"], worst["kind"], worst["error"]) == (60, 895, "down", 0.5)
    assert len(report["outlier_rows"]) == len(report["outlier_experts"]) == OUTLIERS
    assert len(json_bytes(report)) < 10 << 20
    assert isinstance(figures, BankFigures)

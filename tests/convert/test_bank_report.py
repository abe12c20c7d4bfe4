"""A bank's figures: what the collector makes of encoded strips, and what is refused when read from a record."""

from __future__ import annotations

import json

import numpy as np
import pytest

from container.layout import VQ3R
from container.manifest import BankEntry
from container.records import RecordLayout
from convert.bank_report import EXPERTS, ROW_ERROR_BINS, WORST_ROWS, BankFigures, BankReport
from convert.encode import EncodedRows
from convert.plan import LayerExperts
from tests.convert.synthetic import figures_of

N_EXPERTS = 5
SHAPES = {"gate": (96, 16), "up": (96, 16), "down": (16, 96)}
LAYOUT = RecordLayout(VQ3R, SHAPES)


def bank_of(n_experts: int) -> LayerExperts:
    size = n_experts * LAYOUT.stride_bytes
    return LayerExperts(3, BankEntry(file="x", n_experts=n_experts, n_bytes=size, codebook_base=0), LAYOUT)


BANK = bank_of(N_EXPERTS)


def strips_of(kind, rng, errors, norms):
    """Strips of 64 rows as the encoder returns them, with these errors and norms of rows."""
    rows, cols = SHAPES[kind]
    codes = rng.integers(0, 256, (rows, cols // 8, 3))
    for start in range(0, rows, 64):
        part = slice(start, min(rows, start + 64))
        usage = np.stack([np.bincount(codes[part, :, stage].reshape(-1), minlength=256) for stage in range(3)])
        unused = np.zeros(0, np.uint8), np.zeros(0, np.float16)
        yield EncodedRows(*unused, np.square(errors[part]) * norms[part], norms[part], usage)


@pytest.fixture
def drawn():
    """(expert, kind) → errors and squared norms of rows; one zero row, one bad row, one bad matrix."""
    rng = np.random.default_rng(0)
    found = {}
    for expert in range(N_EXPERTS):
        for kind, (rows, _) in SHAPES.items():
            found[expert, kind] = rng.uniform(0.15, 0.17, rows), rng.uniform(1, 4, rows)
    found[2, "up"][1][95] = 0
    found[4, "down"][0][7] = 0.9
    found[1, "gate"][0][:] += 0.1
    return found


@pytest.fixture
def figures(drawn):
    report, rng = BankReport(BANK), np.random.default_rng(1)
    for (expert, kind), (errors, norms) in drawn.items():
        report.add(expert, kind, list(strips_of(kind, rng, errors, norms)))
    return report.figures()


def test_errors_add_up(drawn, figures):
    squared = {key: float((errors**2 * norms).sum()) for key, (errors, norms) in drawn.items()}
    norm = {key: float(norms.sum()) for key, (_, norms) in drawn.items()}
    for kind in SHAPES:
        keys = [(expert, kind) for expert in range(N_EXPERTS)]
        expected = (sum(map(squared.get, keys)) / sum(map(norm.get, keys))) ** 0.5
        assert figures.errors[kind] == pytest.approx(expected, rel=1e-12)
        found = [(squared[key] / norm[key]) ** 0.5 for key in keys]
        assert figures.expert_errors[kind] == pytest.approx(found, rel=1e-4)
    total = (sum(squared.values()) / sum(norm.values())) ** 0.5
    assert figures.errors[EXPERTS] == pytest.approx(total, rel=1e-12)


def test_the_worst_rows_are_found_and_ranked(drawn, figures):
    rows = [
        (error if norms[row] else 0.0, expert, kind, row, (norms[row] / SHAPES[kind][1]) ** 0.5)
        for (expert, kind), (errors, norms) in drawn.items()
        for row, error in enumerate(errors)
    ]
    expected = sorted(rows, key=lambda row: -row[0])[:WORST_ROWS]
    assert len(figures.worst_rows) == WORST_ROWS
    for found, (error, expert, kind, row, rms) in zip(figures.worst_rows, expected, strict=True):
        assert (found.expert, found.kind, found.row) == (expert, kind, row)
        assert (found.error, found.rms) == pytest.approx((error, rms), rel=1e-4)
    assert (figures.worst_rows[0].expert, figures.worst_rows[0].kind, figures.worst_rows[0].row) == (4, "down", 7)
    assert {(row.expert, row.kind) for row in figures.worst_rows[1:]} == {(1, "gate")}


def test_of_equal_rows_the_first_are_named():
    report, rng = BankReport(BANK), np.random.default_rng(1)
    for expert in range(N_EXPERTS):
        for kind, (rows, _) in SHAPES.items():
            report.add(expert, kind, list(strips_of(kind, rng, np.full(rows, 0.5), np.ones(rows))))
    assert [(row.expert, row.kind, row.row) for row in report.figures().worst_rows] == [
        (0, "gate", row) for row in range(WORST_ROWS)
    ]


def test_rows_are_counted_by_error(drawn, figures):
    for kind, (rows, _) in SHAPES.items():
        errors = np.concatenate(
            [np.where(drawn[expert, kind][1] > 0, drawn[expert, kind][0], 0) for expert in range(N_EXPERTS)]
        )
        edges = np.arange(ROW_ERROR_BINS + 1) / ROW_ERROR_BINS
        assert figures.row_errors[kind] == np.histogram(errors, edges)[0].tolist()
        assert sum(figures.row_errors[kind]) == N_EXPERTS * rows
    assert figures.row_errors["up"][0] == 1  # the row of zeros is exact


@pytest.mark.parametrize("error", [1.0, 1e9, 1e150])
def test_an_error_beyond_all_bins_counts_in_the_last(error):
    report, rng = BankReport(BANK), np.random.default_rng(1)
    report.add(0, "gate", list(strips_of("gate", rng, np.full(96, error), np.ones(96))))
    assert report.figures().row_errors["gate"][-1] == 96


def test_a_record_gives_the_figures_back(figures):
    text = json.dumps(figures.to_json(), sort_keys=True)
    assert BankFigures.from_json(json.loads(text), BANK) == figures
    drawn = figures_of(BANK, np.random.default_rng(0))
    assert BankFigures.from_json(json.loads(json.dumps(drawn.to_json())), BANK) == drawn


DAMAGE = {
    "nothing": lambda raw: raw.clear(),
    "one key less": lambda raw: raw.pop("usage"),
    "one key more": lambda raw: raw.update(more=1),
    "an error of another kind": lambda raw: raw["errors"].update(middle=0.1),
    "an error that is no float": lambda raw: raw["errors"].update(gate=1),
    "a negative error": lambda raw: raw["errors"].update(gate=-0.1),
    "an infinite error": lambda raw: raw["errors"].update(gate=float("inf")),
    "an expert less": lambda raw: raw["expert_errors"]["up"].pop(),
    "an expert's error as text": lambda raw: raw["expert_errors"]["up"].__setitem__(0, "0.1"),
    "an object for a list": lambda raw: raw["expert_errors"].update(up=dict.fromkeys("abcde", 0.1)),
    "a kind missing": lambda raw: raw["expert_errors"].pop("down"),
    "a row less": lambda raw: raw["worst_rows"].pop(),
    "a row without its kind": lambda raw: raw["worst_rows"][0].pop("kind"),
    "a row of an unknown kind": lambda raw: raw["worst_rows"][0].update(kind="side"),
    "a row of no expert": lambda raw: raw["worst_rows"][0].update(expert=N_EXPERTS),
    "a row beyond the matrix": lambda raw: raw["worst_rows"][0].update(kind="down", row=16),
    "a row's error as text": lambda raw: raw["worst_rows"][0].update(error="x"),
    "a row without size": lambda raw: raw["worst_rows"][0].update(rms=None),
    "a bin less": lambda raw: raw["row_errors"]["gate"].pop(),
    "a row counted twice": lambda raw: raw["row_errors"]["gate"].__setitem__(0, 1),
    "a count that is true": lambda raw: raw["row_errors"]["up"].__setitem__(0, True),
    "a stage less": lambda raw: raw["usage"]["gate"].pop(),
    "an entry less": lambda raw: raw["usage"]["gate"][0].remove(min(raw["usage"]["gate"][0])),
    "a use more": lambda raw: raw["usage"]["gate"][1].__setitem__(0, raw["usage"]["gate"][1][0] + 1),
    "a negative use": lambda raw: raw["usage"]["gate"].__setitem__(1, [-5, 965, *[0] * 254]),
    "usage that is no list": lambda raw: raw["usage"].update(gate=7),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_figures_are_refused(figures, what):
    raw = json.loads(json.dumps(figures.to_json()))
    DAMAGE[what](raw)
    with pytest.raises((KeyError, TypeError, ValueError)):
        BankFigures.from_json(raw, BANK)


@pytest.mark.parametrize("raw", [None, [], 7, "x", {"errors": []}])
def test_what_are_no_figures_is_refused(raw):
    with pytest.raises((KeyError, TypeError, ValueError)):
        BankFigures.from_json(raw, BANK)


def test_figures_of_another_bank_are_refused(figures):
    with pytest.raises(ValueError, match="not the figures of layer 3"):
        BankFigures.from_json(json.loads(json.dumps(figures.to_json())), bank_of(N_EXPERTS + 1))

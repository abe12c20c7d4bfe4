"""Records of conversions that nobody ran: figures of plausible size for a plan, seeded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from container.layout import VEC_DIM, VQ3R, ExpertQuant
from container.manifest import FileEntry
from container.model import KINDS
from convert.arch import detect
from convert.bank_report import EXPERTS, ROW_ERROR_BINS, WORST_ROWS, BankFigures, WorstRow, rounded
from convert.build import FinishedJob
from convert.plan import ConversionPlan, JobPlan, LayerExperts, plan_conversion
from convert.timing import STEPS
from download.ledger import Origin
from tests.checkpoints import k3_config

PROVENANCE: dict[str, Any] = {
    "tool": {"name": "moedock", "version": "0"},
    "libraries": {"numpy": "0"},
    "options": {"seed": 0, "trunk_bits": 4, "format": "VQ3R"},
    "source": {"config_sha256": "", "shards": {}},
}
ORIGIN = Origin("someone/some-model", "0123abc")
# Kimi K3 as released, but for what no figure of a report depends on.
K3 = {
    "num_hidden_layers": 93,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_experts": 896,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
}


def plan_of(quant: ExpertQuant = VQ3R, **overrides: Any) -> ConversionPlan:
    """The plan of a K3 with these keys of its config."""
    return plan_conversion(detect(k3_config(**overrides)), quant, 4)


def records_of(plan: ConversionPlan) -> dict[str, FinishedJob]:
    """A record for every job."""
    return {job.id: _record(job, np.random.default_rng([7, n])) for n, job in enumerate(plan.jobs)}


def _record(job: JobPlan, rng: np.random.Generator) -> FinishedJob:
    entry = FileEntry(n_bytes=1, sha256="0" * 64) if job.experts is not None else None
    names = [item.entry.name for item in job.trunk]
    return FinishedJob(
        id=job.id,
        bank=entry,
        codebooks=entry,
        trunk_crc32=dict.fromkeys(names, 0),
        trunk_errors={name: rounded(0.1 * rng.random()) for name in names},
        experts=None if job.experts is None else figures_of(job.experts, rng),
        seconds={step: float(rng.exponential(100)) for step in STEPS},
    )


def figures_of(experts: LayerExperts, rng: np.random.Generator) -> BankFigures:
    """Figures that a bank of these shapes could have."""
    n_experts, quant, shapes = experts.bank.n_experts, experts.layout.quant, experts.layout.shapes
    errors = {kind: [rounded(error) for error in rng.normal(0.16, 0.002, n_experts)] for kind in KINDS}
    bins = np.exp(-(((np.arange(ROW_ERROR_BINS) - 80) / 4) ** 2) / 2)
    uses = rng.dirichlet(np.full(quant.n_entries, 3.0), (len(KINDS), quant.n_stages))
    means = {kind: math.fsum(errors[kind]) / n_experts for kind in KINDS}
    return BankFigures(
        errors=means | {EXPERTS: math.fsum(means.values()) / len(means)},
        expert_errors=errors,
        worst_rows=[
            WorstRow(
                int(rng.integers(n_experts)), KINDS[n % 3], n, rounded(0.3 - 0.01 * n + 0.005 * rng.random()), 0.02
            )
            for n in range(WORST_ROWS)
        ],
        row_errors={kind: rng.multinomial(n_experts * shapes[kind][0], bins / bins.sum()).tolist() for kind in KINDS},
        usage={
            kind: [rng.multinomial(n_experts * math.prod(shapes[kind]) // VEC_DIM, stage).tolist() for stage in uses[n]]
            for n, kind in enumerate(KINDS)
        },
    )

"""A memory plan as one JSON-able object and as text: what running a container takes, and how fast a disk makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from container.errors import MoedockError
from container.machine import MemoryFigures
from container.progress import size
from runtime.memory.budget import choose_budget, floor_text
from runtime.memory.plan import MemoryPlan

DISK_SPEEDS = (1.0, 3.0, 7.0, 14.0)  # GB/s: SATA, and NVMe of PCIe 3, 4 and 5


def plan_report(
    plan: MemoryPlan,
    machine: MemoryFigures,
    wanted_bytes: int | None = None,
    disk_speeds: Sequence[float] = DISK_SPEEDS,
) -> dict[str, Any]:
    """Everything that follows from a plan on a machine, sizes in bytes. `disk_speeds` are in GB (10⁹ bytes) a second.

    Where no budget is possible, `budget_bytes` and what follows from it are None, and `problem` says why.
    """
    report: dict[str, Any] = {
        "context": plan.context,
        "chunk": plan.chunk,
        "threads": plan.n_threads,
        "parts": plan.parts,
        "floor_bytes": plan.floor_bytes,
        "bytes_per_position": plan.latent_bytes_per_position,
        "expert_record_bytes": plan.stride_bytes,
        "experts": plan.n_experts,
        "experts_per_token": plan.experts_per_token,
        "working_set_bytes": plan.working_set_bytes,
        "expert_bytes_per_token": plan.working_set_bytes,
        "all_cached_bytes": plan.most_bytes,
        "machine": {
            "physical_bytes": machine.physical_bytes,
            "limit_bytes": machine.limit_bytes,
            "available_bytes": machine.available_bytes,
            "swap_used_bytes": machine.swap_used_bytes,
        },
    }
    report |= _budget(plan, machine, wanted_bytes)
    cached_share = report["cached_share"] or 0.0
    report["speed"] = [_speed(plan, gb_per_second, cached_share) for gb_per_second in disk_speeds]
    return report


def plan_text(plan: MemoryPlan, report: dict[str, Any]) -> str:
    """What `plan_report` found, for people."""
    lines = ["memory needed at least (floor):", floor_text(plan)]
    lines += [
        f"context:     {size(plan.latent_bytes_per_position)} a position",
        f"per token:   {plan.experts_per_token} experts of {size(plan.stride_bytes)}, {size(plan.working_set_bytes)} "
        "in all (working set)",
        f"all cached:  {size(plan.most_bytes)}, {plan.n_experts} experts",
    ]
    if report["problem"] is None:
        lines.append(
            f"budget:      {size(report['budget_bytes'])}, of which {size(report['cache_bytes'])} cache "
            f"{report['cached_share']:.1%} of the experts"
        )
    lines += [f"{key}:     {report[key]}" for key in ("problem", "warning") if report[key] is not None]
    lines.append(
        "tokens a second as far as the disk decides: nothing cached | hits as chance would have them (or more)"
    )
    lines += [
        f"  {each['disk_gb_per_second']:>5.1f} GB/s  {_rate(each['tokens_per_second_uncached'])} | "
        f"{_rate(each['tokens_per_second_even_routing'])}"
        for each in report["speed"]
    ]
    return "\n".join(lines)


def _budget(plan: MemoryPlan, machine: MemoryFigures, wanted_bytes: int | None) -> dict[str, Any]:
    try:
        budget = choose_budget(plan, machine, wanted_bytes)
    except MoedockError as error:
        problem = str(error).splitlines()[0]
        return dict.fromkeys(("budget_bytes", "cache_bytes", "cached_share", "warning")) | {"problem": problem}
    return {
        "budget_bytes": budget.n_bytes,
        "cache_bytes": plan.cache_bytes(budget.n_bytes),
        "cached_share": plan.n_slots(budget.n_bytes) / plan.n_experts if plan.n_experts else 1.0,
        "warning": budget.warning,
        "problem": None,
    }


def _speed(plan: MemoryPlan, gb_per_second: float, cached_share: float) -> dict[str, Any]:
    """Tokens a second as far as the disk decides: with nothing cached, and with hits as often as chance would have it.

    Real routing repeats itself, so a cache of some share of the experts answers more than that share of requests.
    """
    bytes_per_second = gb_per_second * 1e9
    missed = plan.working_set_bytes * (1 - cached_share)
    return {
        "disk_gb_per_second": gb_per_second,
        "tokens_per_second_uncached": bytes_per_second / plan.working_set_bytes if plan.working_set_bytes else None,
        "tokens_per_second_even_routing": bytes_per_second / missed if missed else None,  # None: the disk does nothing
    }


def _rate(tokens_per_second: float | None) -> str:
    return "   any" if tokens_per_second is None else f"{tokens_per_second:6.2f}"

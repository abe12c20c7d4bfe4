"""Results in words: what `python -m convert` prints for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container.layout import REPORT_PAGE_NAME
from container.progress import duration, size
from convert.run import Summary


def dry_run_text(plan: Mapping[str, Any]) -> str:
    """A dry run's plan for people."""
    banks = {name: n for name, n in plan["file_bytes"].items() if name.startswith("experts-")}
    lines = [
        f"{plan['arch']}: {plan['n_weights']:,} weights in {plan['n_tensors']:,} tensors",
        f"layers:    {len(plan['layers'])} to convert; {plan['moe_layers']} of the model with "
        f"{plan['experts_per_layer']} experts each",
    ]
    if banks:
        each = next(iter(banks.values()))
        lines.append(
            f"banks:     {len(banks)} × {size(each)} = {size(plan['records_bytes'])} ({plan['format']} records)"
        )
    lines += [f"{f'{name}:':<14} {size(n)}" for name, n in plan["file_bytes"].items() if name not in banks]
    lines += [
        f"container: {size(plan['total_bytes'])} ({plan['total_bytes']:,} bytes)",
        f"memory:    {size(plan['peak_memory_bytes'])} at most, {plan['workers']} worker(s) × "
        f"{plan['threads_per_worker']} thread(s)",
        f"disk:      {size(plan['room_bytes'])} needed, {size(plan['free_disk_bytes'])} free",
    ]
    if plan["names_only"]:
        lines.append("no shard is here: planned from names and config alone")
    lines += [f"note: {note}" for note in plan["notes"]]
    lines += [f"problem: {problem}" for problem in plan["problems"]]
    return "\n".join(lines)


def summary_text(summary: Summary, output: Path) -> str:
    """A run's result for people."""
    if summary.already_complete:
        notes = "".join(f"note: {note}\n" for note in summary.notes)
        return f"{notes}{output} is complete; `python -m validate {output}` proves it"
    lines = []
    if summary.n_jobs_done:
        lines = [
            f"{summary.n_weights:,} weights in {duration(summary.elapsed_seconds)}: "
            f"{summary.weights_per_second / 1e6:.1f} M weights/s",
            f"peak memory of a worker: {size(summary.peak_worker_bytes)}",
        ]
    total = sum(summary.step_seconds.values())
    if total:
        shares = (f"{name} {100 * seconds / total:.0f} %" for name, seconds in summary.step_seconds.items())
        lines.append(f"time: {', '.join(shares)}")
    if summary.relative_error is not None:
        lines.append(f"relative error of the experts: {100 * summary.relative_error:.2f} %")
    lines += [f"note: {note}" for note in summary.notes]
    if summary.complete:
        lines.append(f"report: {output / REPORT_PAGE_NAME}")
        lines.append(f"{output} is complete: {size(summary.container_bytes)}")
    else:
        lines.append(f"{summary.n_jobs_left} job(s) left: run the same command without --layers to finish")
    return "\n".join(lines)

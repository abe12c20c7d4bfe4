"""`runtime.plan`: what running a container would take, before anything of it but the manifest is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from container.byte_size import parse_bytes
from container.machine import available_cores, memory_figures
from container.manifest import Manifest
from container.reader import model_of
from runtime.memory.plan import MemoryPlan, plan_memory
from runtime.memory.report import DISK_SPEEDS, plan_report
from runtime.options import RunOptions


def plan(
    path: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    context: int = RunOptions.context,
    threads: int | None = RunOptions.threads,
    readers: int = RunOptions.readers,
    lookahead: int = RunOptions.lookahead,
    chunk: int = RunOptions.chunk,
    disk_speeds: Sequence[float] = DISK_SPEEDS,
) -> dict[str, Any]:
    """Memory and speed of a container opened with these options (as `runtime.open` takes them) on this machine.

    Sizes are in bytes, `disk_speeds` in GB (10⁹ bytes) a second. Only the manifest is read. Where no budget is possible
    `problem` says why. Raises FormatError for a manifest that is not usable.
    """
    options = RunOptions(context=context, threads=threads, readers=readers, lookahead=lookahead, chunk=chunk)
    return plan_report(memory_plan(Path(path), options), memory_figures(), budget_bytes(budget), disk_speeds)


def memory_plan(folder: Path, options: RunOptions) -> MemoryPlan:
    """The memory that a container takes. Raises FormatError."""
    manifest = Manifest.read(folder)
    return plan_memory(manifest, model_of(folder, manifest), options, n_threads=options.threads or available_cores())


def budget_bytes(budget: int | str | None) -> int | None:
    """A budget given in bytes or as "24GiB". Raises UsageError."""
    return parse_bytes(budget, "the budget") if isinstance(budget, str) else budget

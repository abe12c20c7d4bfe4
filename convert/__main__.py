"""`python -m convert`: a checkpoint into a container."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from container.errors import MoedockError
from container.progress import duration, size
from convert.options import ConvertOptions, parse_layers
from convert.run import Summary, convert, dry_run

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m convert",
        description="Turn a Kimi K3 or Kimi-Linear checkpoint into a container. Resumes an interrupted conversion: "
        "run the same command again.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="checkpoint folder as Hugging Face lays it out")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder of the container, new or of the same build")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per available core)")
    parser.add_argument(
        "--layers", metavar="LIST", help="convert only these layers now, like 1-10,12; finish with a run without it"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the training sample (default: 0)")
    parser.add_argument("--trunk-bits", type=int, default=4, choices=(4, 8), help="bits of the trunk (default: 4)")
    parser.add_argument("--dry-run", action="store_true", help="check and print the plan, write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        options = ConvertOptions(
            source=arguments.source,
            output=arguments.output,
            workers=arguments.workers,
            layers=None if arguments.layers is None else parse_layers(arguments.layers),
            seed=arguments.seed,
            trunk_bits=arguments.trunk_bits,
            dry_run=arguments.dry_run,
        )
        if options.dry_run:
            plan = dry_run(options)
            print(json.dumps(plan, indent=1) if arguments.json else describe_plan(plan))
            return 1 if plan["problems"] else 0
        summary = convert(options, sys.stderr)
        print(json.dumps(summary.to_json(), indent=1) if arguments.json else describe_summary(summary, options))
        return 0
    except MoedockError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a path that the system refuses, a closed pipe
        print(f"error: {error}", file=sys.stderr)
        return MoedockError.exit_code
    except KeyboardInterrupt:
        print("interrupted; finished layers are kept, run the same command to continue", file=sys.stderr)
        return INTERRUPTED


def describe_plan(plan: dict[str, Any]) -> str:
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
        f"disk:      {size(plan['free_disk_bytes'])} free",
    ]
    if plan["names_only"]:
        lines.append("no shard is here: planned from names and config alone")
    lines += [f"note: {note}" for note in plan["notes"]]
    lines += [f"problem: {problem}" for problem in plan["problems"]]
    return "\n".join(lines)


def describe_summary(summary: Summary, options: ConvertOptions) -> str:
    """A run's result for people."""
    if summary.already_complete:
        return f"{options.output} is complete; `python -m validate {options.output}` proves it"
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
        lines.append(f"{options.output} is complete: {size(summary.container_bytes)}")
    else:
        lines.append(f"{summary.n_jobs_left} job(s) left: run the same command without --layers to finish")
    return "\n".join(lines)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""`bench`: how fast a container runs on this machine, and how near to the disk's own speed."""

from __future__ import annotations

import argparse
from time import perf_counter

from container.errors import UsageError
from runtime.commands import arguments as shared
from runtime.commands.opening import opened
from runtime.commands.streams import Streams
from runtime.memory.planning import memory_plan

_EXAMPLES = """\
  python -m runtime bench model.waste
  python -m runtime bench model.waste --cold --json     # the disk alone: as little cache as possible"""


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(commands, "bench", "measure how fast a container runs here", work, examples=_EXAMPLES)
    parser.add_argument("-n", type=shared.count, default=32, metavar="N", help="tokens to make (default 32)")
    parser.add_argument(
        "--prompt", type=shared.count, default=128, metavar="N", help="tokens to read first (default 128)"
    )
    parser.add_argument(
        "--cold", action="store_true", help="take the smallest budget, so that nearly nothing is cached"
    )
    shared.add_json(parser)
    shared.add_opening(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code. Raises UsageError for --cold with a budget."""
    # imported only now: --help should not wait for compiled code
    from runtime.bench import bench, bench_text

    needed = arguments.prompt + arguments.n
    if needed > arguments.ctx:
        raise UsageError(f"--prompt and -n are {needed} tokens, --ctx has room for {arguments.ctx}")
    if arguments.cold:
        if arguments.budget is not None:
            raise UsageError("--cold takes the smallest budget; leave out --budget")
        arguments.budget = memory_plan(arguments.container, shared.memory_options(arguments)).floor_bytes
    start = perf_counter()
    with opened(arguments, streams) as model:
        load_seconds = perf_counter() - start
        report = bench(model.engine, n_prompt=arguments.prompt, n_tokens=arguments.n, n_readers=arguments.readers)
        trunk_bytes = model.engine.plan.trunk_bytes
    report |= {
        "load_seconds": load_seconds,
        "trunk_bytes": trunk_bytes,
        "load_gb_per_second": trunk_bytes / load_seconds / 1e9,
    }
    return streams.show_result(report, bench_text(report), as_json=arguments.json)

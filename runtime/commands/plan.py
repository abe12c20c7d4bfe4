"""`plan`: what running a container would take, from its manifest alone."""

from __future__ import annotations

import argparse

from container.machine import memory_figures
from runtime.commands import arguments as shared
from runtime.commands.streams import Streams
from runtime.memory.planning import memory_plan
from runtime.memory.report import DISK_SPEEDS, plan_report, plan_text

_EXAMPLES = """\
  python -m runtime plan model.waste --ctx 32768
  python -m runtime plan model.waste --budget 40GiB --disk 5.5"""


def add_parser(commands: shared.Commands) -> None:
    """Its command line."""
    parser = shared.add_command(
        commands, "plan", "show the memory that running takes, and what the disk makes of it", work, examples=_EXAMPLES
    )
    parser.add_argument(
        "--disk", action="append", type=shared.positive, metavar="GB/S", help="speed of your disk; may be repeated"
    )
    shared.add_json(parser)
    shared.add_memory(parser)


def work(arguments: argparse.Namespace, streams: Streams) -> int:
    """Run it; the exit code is 1 where no budget is possible."""
    plan = memory_plan(arguments.container, shared.memory_options(arguments))
    report = plan_report(plan, memory_figures(), arguments.budget, arguments.disk or DISK_SPEEDS)
    streams.show_result(report, plan_text(plan, report), as_json=arguments.json)
    return 0 if report["problem"] is None else 1

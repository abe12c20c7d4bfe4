"""`python -m convert`: a checkpoint into a container."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from container.command import exit_code_of, leave


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m convert",
        description="Turn a Kimi K3 or Kimi-Linear checkpoint into a container. Resumes an interrupted conversion: "
        "run the same command again.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="checkpoint folder as Hugging Face lays it out, or hf://ORG/NAME[@REVISION]"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="folder of the container, new or of the same build")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: one per available core, as memory allows)"
    )
    parser.add_argument(
        "--layers", metavar="LIST", help="convert only these layers now, like 1-10,12; finish with a run without it"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the training sample (default: 0)")
    parser.add_argument("--trunk-bits", type=int, default=4, choices=(4, 8), help="bits of the trunk (default: 4)")
    parser.add_argument(
        "--quality",
        choices=("fast", "balanced", "best"),
        default="balanced",
        help="less error against speed, in the same bytes (default: balanced)",
    )
    parser.add_argument(
        "--format",
        choices=("vq3r", "vq4p", "vq2r"),
        default="vq3r",
        help="of the experts: 3 bits a weight, 3 bits with quicker search, or 2 bits (default: vq3r)",
    )
    parser.add_argument(
        "--device", default="cpu", help="what encodes the experts: cpu, cuda or cuda:N, a GPU's number (default: cpu)"
    )
    parser.add_argument(
        "--reclaim",
        choices=("off", "dry", "on"),
        default="off",
        help="on: delete each shard of SRC once all that is made of it is safe; dry: only say so (default: off)",
    )
    parser.add_argument("--staging", type=Path, metavar="DIR", help="folder that shards of hf:// pass through")
    parser.add_argument(
        "--staging-size", default="60GB", metavar="SIZE", help="of the shards in it at once (default: 60GB)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print the plan, write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    return exit_code_of(
        lambda: _run(arguments), "interrupted; finished layers are kept, run the same command to continue"
    )


def _run(arguments: argparse.Namespace) -> int:
    # imported only now: --help should not wait for compiled kernels, and Ctrl-C while they load is caught
    from container.errors import UsageError
    from container.layout import EXPERT_QUANTS, ExpertFormat
    from convert import describe, prepare, run
    from convert.options import ConvertOptions, Reclaim, parse_layers, parse_remote, parse_size
    from convert.quality import Quality

    remote = parse_remote(arguments.source)
    if (remote is None) != (arguments.staging is None):
        raise UsageError("--staging DIR goes with SRC hf://ORG/NAME, and only with it")
    options = ConvertOptions(
        source=Path(arguments.source) if remote is None else arguments.staging,
        output=arguments.output,
        remote=remote,
        staging_bytes=parse_size(arguments.staging_size),
        reclaim=Reclaim(arguments.reclaim),
        workers=arguments.workers,
        layers=None if arguments.layers is None else parse_layers(arguments.layers),
        seed=arguments.seed,
        trunk_bits=arguments.trunk_bits,
        quality=Quality(arguments.quality),
        device=arguments.device,
        quant=EXPERT_QUANTS[ExpertFormat[arguments.format.upper()]],
        dry_run=arguments.dry_run,
    )
    if options.dry_run:
        plan = prepare.dry_run(options, sys.stderr)
        print(json.dumps(plan, indent=1) if arguments.json else describe.dry_run_text(plan))
        return 1 if plan["problems"] else 0
    summary = run.convert(options, sys.stderr)
    print(json.dumps(summary.to_json(), indent=1) if arguments.json else describe.summary_text(summary, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(leave(main()))

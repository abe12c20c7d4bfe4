"""`python -m download`: a checkpoint from the hub into a folder."""

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
        prog="python -m download",
        description="Fetch a checkpoint from the Hugging Face hub and prove every file. Resumes an interrupted "
        "download, at the byte where it stopped: run the same command again.",
        epilog="HF_TOKEN or `hf auth login` for gated repositories; HF_ENDPOINT for another hub.",
    )
    add = parser.add_argument
    add("repository", metavar="REPO", help="ORG/NAME, as its page's address ends")
    add("folder", metavar="DEST", type=Path, help="folder, new or of an earlier download by whatever tool")
    add("--revision", metavar="R", help="branch, tag or commit (default: main)")
    add("--jobs", type=int, default=4, metavar="N", help="files at once (default: 4)")
    add("--include", action="append", default=[], metavar="GLOB", help="fetch what matches, not what is needed")
    add("--exclude", action="append", default=[], metavar="GLOB", help="leave out what matches; both may be repeated")
    add("--dry-run", action="store_true", help="print the plan, write nothing")
    add("--check", choices=("size", "sha256"), help="only compare the folder with the repository; removes nothing")
    add("--min-free", type=float, default=1.0, metavar="GB", help="to stay free on the disk (default: 1)")
    add("--max-rate", type=float, metavar="MB/S", help="bound of all transfers together (default: none)")
    add("--json", action="store_true", help="print the result as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    return exit_code_of(
        lambda: _run(arguments), "interrupted; what was fetched is kept, run the same command to continue"
    )


def _run(arguments: argparse.Namespace) -> int:
    # imported only now: --help should not wait for the libraries, and Ctrl-C while they load is caught
    from download import audit, describe, run
    from download.options import Check, DownloadOptions

    options = DownloadOptions(
        repository=arguments.repository,
        folder=arguments.folder,
        revision=arguments.revision,
        jobs=arguments.jobs,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        dry_run=arguments.dry_run,
        check=None if arguments.check is None else Check(arguments.check),
        min_free_gb=arguments.min_free,
        max_rate_mb=arguments.max_rate,
    )
    if options.dry_run:
        plan = run.plan_download(options, sys.stderr)
        print(json.dumps(plan.to_json(), indent=1) if arguments.json else describe.plan_text(plan))
        return 1 if plan.shortage else 0
    if options.check is not None:
        found = audit.audit(options, sys.stderr)
        print(json.dumps(found.to_json(), indent=1) if arguments.json else describe.audit_text(found))
        return 1 if found.problems else 0
    summary = run.download(options, sys.stderr)
    print(json.dumps(summary.to_json(), indent=1) if arguments.json else describe.summary_text(summary))
    return 0


if __name__ == "__main__":
    sys.exit(leave(main()))

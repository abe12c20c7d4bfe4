"""Serves a folder as a model repository until interrupted: `python -m tests.hub FOLDER --repo org/name`."""

from __future__ import annotations

import argparse
import contextlib
import signal
from pathlib import Path

from tests.hub.server import HubServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repo", default="local/model", metavar="ORG/NAME")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--throttle", type=int, metavar="BYTES", help="bytes per second and connection")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    with HubServer(port=options.port, bytes_per_second=options.throttle) as hub:
        commit = hub.add(options.repo, options.folder).find("main")
        assert commit is not None
        print(f"{hub.endpoint}\n{options.repo} at {commit.sha}, {len(commit.files)} files", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()

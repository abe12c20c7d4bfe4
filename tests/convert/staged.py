"""A checkpoint on the loopback hub, conversions that stream it, and what they asked for and held meanwhile."""

from __future__ import annotations

import io
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import convert.run
from convert.options import ConvertOptions, Remote
from convert.quality import Quality
from convert.run import Summary
from download.part import Part
from tests import hub as served
from tests.convert.small import Converted, contents, convert_here, small_k3
from tests.hub import HubServer, Request

REPOSITORY_ID = "org/name"


def locally_converted(source: Path, output: Path, **options: Any) -> Converted:
    """A checkpoint folder, and its container made without any staging."""
    summary, log = convert_here(source, output, **options)
    return Converted(small_k3(), source, output, summary, log, contents(output))


def stream_here(
    staging: Path, output: Path, repository: str = REPOSITORY_ID, revision: str | None = None, **options: Any
) -> tuple[Summary, str]:
    """A conversion of the hub's repository in this process: summary and messages. Fast, unless told otherwise."""
    stream = io.StringIO()
    options = {"quality": Quality.FAST, "remote": Remote(repository, revision), **options}
    return convert.run.convert(ConvertOptions(source=staging, output=output, **options), stream), stream.getvalue()


def shard_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each shard of a checkpoint folder."""
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}


def two_largest(source: Path) -> int:
    """A bound for staging: two shards, whichever."""
    return sum(sorted(shard_sizes(source).values())[-2:])


def whole_requests(hub: HubServer) -> list[Request]:
    """The requests for a shard up to its end, as they ended; headers and samples are read by closed ranges."""
    return [
        one
        for one in hub.requests
        if one.part is served.Part.CDN and one.name.endswith(".safetensors") and one.range_stop is None
    ]


def times_fetched(hub: HubServer) -> Counter[str]:
    """How often each shard was begun at its first byte."""
    return Counter(one.name for one in whole_requests(hub) if one.range_start is None)


def staged_bytes(staging: Path) -> int:
    """What shards and parts of them take in a staging folder."""
    total = 0
    for pattern in ("*.safetensors", ".moedock/parts/*.safetensors.part"):
        for path in staging.glob(pattern):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue  # it went just now
    return total


class MostHeld:
    """The most bytes of shards that lay in a staging folder at once, measured whenever they have grown."""

    def __init__(self, staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_bytes = 0
        lock = threading.Lock()  # nothing grows while it is measured, so what is found was there at one time
        append, publish = Part.append, Part.publish

        def measured_append(part: Part, block: bytes) -> None:
            with lock:
                append(part, block)
                self.n_bytes = max(self.n_bytes, staged_bytes(staging))

        def held_publish(part: Part) -> None:
            with lock:
                publish(part)

        monkeypatch.setattr(Part, "append", measured_append)
        monkeypatch.setattr(Part, "publish", held_publish)


def fetching_threads() -> list[str]:
    """Names of threads that fetch or hash something and do not end within two seconds."""
    ours = ("staging", "receive", "reading the shards", "hash")
    end = time.monotonic() + 2
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return left

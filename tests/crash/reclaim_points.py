"""The same for a conversion that deletes its source: it must finish after every strike, and never delete too early.

    python -m tests.crash.reclaim_points SOURCE FOLDER {kill,full} {some,all}     prints a JSON report

`some` strikes where the source folder is touched or a job's record is published, `all` at every step. Each run works on
a copy of SOURCE; whatever run is about to delete a shard must by then have made all durable that was made of it.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import convert.codebooks
import convert.run
from convert.options import ConvertOptions, Reclaim
from convert.quality import Quality
from download.folder import STATE_FOLDER
from tests.convert.reclaiming import Consumers, reclaimed_lines, shards_here, small_files
from tests.convert.small import contents, differences, serial_work
from tests.crash.durable import Durable
from tests.crash.publish_points import LITTLE_TRAINING, MAX_STEPS, REMOVALS, Steps, attempt, check_state, forked

SHARD_NUMBER = re.compile(r"-\d+-of-\d+")


class ReclaimSteps(Steps):
    """Steps of a conversion that gives shards back: each may go only when nothing can be lost any more."""

    def __init__(self, source: Path, output: Path, strike: Callable[[], None], number: int | None = None) -> None:
        super().__init__(strike, number)
        self.source = source.resolve()
        self.output = output.resolve()
        self.places: list[str] = []  # of every step: "source" or "output"
        base = self.output.parent
        self.durable = Durable(base, [self.output, self.source / STATE_FOLDER], base / f"{self.output.name}.durable")

    def before(self, what: str, path: Path) -> None:
        """No shard goes before the ledger and all that was made of it would survive a power cut."""
        self.places.append("source" if path.is_relative_to(self.source) else "output")
        if what == "unlink" and path.parent == self.source:
            assert path.name in reclaimed_lines(self.source), path
            lost = self.durable.lost()
            assert not lost, (path, lost)

    def synced(self, path: Path) -> None:
        """Remember it."""
        self.durable.synced(path)


def run(source: Path, output: Path) -> None:
    options = ConvertOptions(source=source, output=output, quality=Quality.FAST, reclaim=Reclaim.ON)
    convert.run.convert(options, io.StringIO())


def watched(source: Path, output: Path) -> str:
    """A run without a strike; its steps and their places."""
    steps = ReclaimSteps(source, output, lambda: None)
    steps.watch()
    run(source, output)
    return json.dumps([steps.seen, steps.places])


def chosen(seen: list[str], places: list[str], mode: str, which: str) -> list[int]:
    """Numbers, from 1, of the steps to strike at."""
    numbers = range(1, len(seen) + 1)
    if which == "all":
        return list(numbers)
    found, kinds, working = list[int](), set[str](), False
    for number, label, place in zip(numbers, seen, places, strict=True):
        kind = SHARD_NUMBER.sub("", label)
        if place == "source" and (working or kind not in kinds):  # the first shard's header stands for the others'
            found.append(number)
        elif label.startswith("rename to done-"):
            found += [number, number + 1]  # before the record, and before its name is synced
            working = True
        kinds.add(kind)
    # removals need no room, and what a full disk does to a rename is what it does to the sync before
    return [number for number in found if mode == "kill" or not seen[number - 1].startswith((*REMOVALS, "rename to"))]


class Points:
    """Strikes at chosen steps of one checkpoint's conversion."""

    def __init__(self, source: Path, folder: Path, mode: str) -> None:
        self.source = source
        self.folder = folder
        self.mode = mode
        convert.run.convert(
            ConvertOptions(source=source, output=folder / "expected", quality=Quality.FAST), io.StringIO()
        )
        self.expected = contents(folder / "expected")
        self.consumers = Consumers(source, folder / "expected")

    def steps(self) -> tuple[list[str], list[str]]:
        """Labels and places of all steps of a run that nothing happens to."""
        source, output = self._copy("whole")
        status, text = forked(lambda: watched(source, output))
        assert status == 0, text
        assert text.startswith("["), text
        self._assert_done(source, output, "nothing")
        seen, places = json.loads(text)
        return seen, places

    def strike(self, number: int) -> None:
        """Strike at one step, and let the same command finish."""
        source, output = self._copy(f"step-{number}")
        label = attempt(partial(run, source, output), self.mode, number, partial(ReclaimSteps, source, output))
        assert label is not None, number
        self.consumers.assert_safe(source, output)
        gone = self.consumers.tensors.keys() - shards_here(source)
        assert gone <= set(reclaimed_lines(source)), label
        check_state(output, self.expected)
        status, text = forked(lambda: watched(source, output))
        assert (status, text[:1]) == (0, "["), (label, text)
        self._assert_done(source, output, label)
        shutil.rmtree(source)
        shutil.rmtree(output)

    def _copy(self, name: str) -> tuple[Path, Path]:
        return Path(shutil.copytree(self.source, self.folder / f"{name}-source")), self.folder / f"{name}-out"

    def _assert_done(self, source: Path, output: Path, label: str) -> None:
        different = differences(contents(output), self.expected)
        assert not different, (label, different)
        assert not shards_here(source), label
        assert small_files(source) == small_files(self.source), label
        said = reclaimed_lines(source)
        assert set(said) == set(self.consumers.tensors), (label, said)
        assert len(said) <= len(self.consumers.tensors) + 1, (label, said)  # again after a strike amid one


def main(source: Path, folder: Path, mode: str, which: str) -> None:
    convert.run.run_work = serial_work  # type: ignore[assignment]
    convert.codebooks.GREEDY_ALONE = LITTLE_TRAINING
    points = Points(source, folder, mode)
    seen, places = points.steps()
    assert len(seen) < MAX_STEPS
    numbers = chosen(seen, places, mode, which)
    for number in numbers:
        points.strike(number)
    report: dict[str, Any] = {"labels": seen, "places": places, "struck": numbers}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

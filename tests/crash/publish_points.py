"""Kills, or fills the disk of, a conversion at every step at which a file is synced, renamed or removed.

    python -m tests.crash.publish_points SOURCE FOLDER {kill,full} {some,all}    at many steps; prints a JSON report
    python -m tests.crash.publish_points SOURCE OUTPUT kill LABEL                at one step, for good

`some` strikes where other lines of the converter run, `all` at every step. Jobs run in one process, one after the
other, so that the steps have an order; each attempt is a fork of this process, which has imported and compiled
everything already.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import convert.codebooks
import convert.run
from container.errors import BuildError
from container.layout import MANIFEST_NAME
from convert.options import ConvertOptions
from convert.quality import Quality
from convert.run import Summary
from tests.convert.small import contents, differences, serial_work

MAX_STEPS = 500
LITTLE_TRAINING = ((65_536, 1),)  # most of the time that a conversion takes would go there, between two steps
REMOVALS = ("unlink", "rmdir")  # a full disk does not hinder these
# The same lines publish the records of all jobs, and all of these files.
JOB_NUMBER = re.compile(r"-(outside-|L)\d+")
SIDE_FILE = re.compile(r"(codebooks\.bin|tokenizer\.model|(specials|chat|vision|report)\.json|report\.html)$")


class Steps:
    """Counts the steps of a conversion, and strikes before the chosen one."""

    def __init__(self, strike: Callable[[], None], number: int | None = None, label: str | None = None) -> None:
        self.strike = strike
        self.number = number
        self.label = label
        self.seen: list[str] = []

    def watch(self) -> None:
        """Put this in front of every call that makes files durable, final or absent."""
        real_fsync, real_replace, real_unlink, real_rmdir = os.fsync, Path.replace, os.unlink, os.rmdir

        def fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").resolve()
            self._step("fsync", path)
            real_fsync(descriptor)
            self.synced(path)

        def replace(source: Path, target: Path) -> Path:
            self._step("rename to", Path(target))
            return real_replace(source, target)

        def unlink(path: Any, **options: Any) -> None:
            self._step("unlink", Path(path))
            real_unlink(path, **options)

        def rmdir(path: Any, **options: Any) -> None:
            self._step("rmdir", Path(path))
            real_rmdir(path, **options)

        os.fsync, os.unlink, os.rmdir = fsync, unlink, rmdir  # type: ignore[assignment]
        Path.replace = replace  # type: ignore[assignment, method-assign]

    def before(self, what: str, path: Path) -> None:
        """A step is about to be done."""

    def synced(self, path: Path) -> None:
        """A file or a folder was synced."""

    def _step(self, what: str, path: Path) -> None:
        self.before(what, path)
        label = f"{what} {stable(path.name)}"
        self.seen.append(label)
        if len(self.seen) == self.number or label == self.label:
            self.strike()


def stable(name: str) -> str:
    """A temporary file's name without its random part."""
    return f"new {'.'.join(name.split('.')[1:-2])}" if name.endswith(".tmp") else name


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run(source: Path, output: Path) -> Summary:
    return convert.run.convert(ConvertOptions(source=source, output=output, quality=Quality.FAST), io.StringIO())


def forked(function: Callable[[], str | None]) -> tuple[int, str]:
    """Run `function` in a fork. (wait status, what it returned or raised)."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = function() or ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


def attempt(
    convert_once: Callable[[], object], mode: str, number: int, steps_of: Callable[..., Steps] = Steps
) -> str | None:
    """Strike at one step. Returns its label, None when the conversion has fewer steps."""
    read_end, write_end = os.pipe()

    def struck() -> None:
        os.write(write_end, steps.seen[-1].encode())
        (kill if mode == "kill" else fill)()

    steps = steps_of(struck, number)

    def body() -> str | None:
        steps.watch()
        try:
            convert_once()
        except BuildError as error:
            return str(error)
        return None

    status, text = forked(body)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        label = pipe.read()
    if not label:
        assert (status, text) == (0, ""), text
        return None
    if mode == "kill":
        assert os.WTERMSIG(status) == signal.SIGKILL, (label, status, text)
    elif not label.startswith(REMOVALS):
        assert "the disk is full" in text, (label, text)
    return label


def check_state(output: Path, expected: dict[str, bytes]) -> None:
    """Every file under its final name is whole, and with the manifest there are all of them."""
    final = {
        name: data
        for name, data in contents(output).items()
        if not name.startswith(".build/") and not name.endswith(".tmp")
    }
    different = differences(final, {name: expected[name] for name in final})
    assert not different, different
    if (output / MANIFEST_NAME).exists():
        assert expected.keys() <= contents(output).keys()


def resumed(source: Path, output: Path) -> str:
    """Run again what was struck; the number of jobs that this took."""
    return str(run(source, output).n_jobs_done)


def watched(source: Path, output: Path) -> str:
    """A run without a strike; the labels of its steps."""
    steps = Steps(lambda: None)
    steps.watch()
    run(source, output)
    return json.dumps(steps.seen)


def chosen(seen: Sequence[str], output: Path, mode: str, which: str) -> list[int]:
    """Numbers, from 1, of the steps to strike at.

    Of each kind the first and the last, where everything before it is done. A full disk hinders no removal, and what it
    does to a rename is what it does to the sync before: the last of each kind, without both.
    """
    numbers = range(1, len(seen) + 1)
    if which == "all":
        return list(numbers)
    first, last, before = dict[str, int](), dict[str, int](), ""
    for number, label in zip(numbers, seen, strict=True):
        kind = SIDE_FILE.sub("side file", JOB_NUMBER.sub("", label))
        if label in ("fsync .build", f"fsync {output.name}"):
            kind = f"{kind} after {before}"  # a folder is synced for what was renamed in it
        first.setdefault(kind, number)
        last[kind] = number
        before = kind
    if mode == "kill":
        return sorted({*first.values(), *last.values()})
    return sorted(number for kind, number in last.items() if not kind.startswith((*REMOVALS, "rename to")))


def strike_at_steps(source: Path, folder: Path, mode: str, which: str) -> dict[str, Any]:
    """Strike at one step after the other, resume, compare; nothing that was finished is done again."""
    run(source, folder / "expected")  # here, so that every fork has all that is compiled
    expected = contents(folder / "expected")
    status, text = forked(partial(watched, source, folder / "watched"))
    assert status == 0, text
    seen = json.loads(text)
    assert len(seen) < MAX_STEPS
    records = [label for label in seen if label.startswith("rename to done-")]
    numbers = chosen(seen, folder / "watched", mode, which)
    for number in numbers:
        output = folder / f"step-{number}"
        label = attempt(partial(run, source, output), mode, number)
        assert label == seen[number - 1].replace("watched", output.name), (label, number)
        check_state(output, expected)
        n_left = len(records) - sum(done in records for done in seen[: number - 1])
        assert forked(partial(resumed, source, output)) == (0, str(n_left)), label
        different = differences(contents(output), expected)
        assert not different, (label, different)
        shutil.rmtree(output)
    return {"labels": seen, "struck": numbers}


def main(source: Path, folder: Path, mode: str, which: str) -> None:
    convert.run.run_work = serial_work  # type: ignore[assignment]
    if which in ("some", "all"):
        convert.codebooks.GREEDY_ALONE = LITTLE_TRAINING
        print(json.dumps(strike_at_steps(source, folder, mode, which)))
    else:
        Steps(kill, label=which).watch()
        run(source, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

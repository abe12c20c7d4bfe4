"""One run at a time in a folder, whatever becomes of the one that holds it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import container.lock
from container.errors import BusyError, MoedockError
from container.lock import held_lock

ROOT = Path(__file__).parents[2]

# Holds the lock until it is killed, with a child of its own beside it that it does not take with it.
HOLDER = """
import subprocess, sys
from pathlib import Path
from container.lock import held_lock

with held_lock(Path(sys.argv[1]), "another run"):
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(waiting, stdin=sys.stdin, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
"""


def refusal(path: Path, what: str = "another run") -> str:
    """The message with which a second holder is refused."""
    with pytest.raises(BusyError) as caught, held_lock(path, what):
        pytest.fail("two hold one lock")
    return str(caught.value)


def assert_free(path: Path) -> None:
    with held_lock(path, "another run"):
        assert path.read_text() == f"{os.getpid()} on {os.uname().nodename}\n"


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock; it has ended when the block is left, and its child soon."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    child = process.stdout.readline()
    try:
        assert child, "the holder did not start"
        yield process
        os.kill(int(child), 0)  # the child was there all the time
    finally:
        process.stdin.close()  # the child reads its end
        process.kill()
        process.stdout.close()
        process.wait()


def test_the_second_is_refused_and_told_who_holds_it(tmp_path):
    path = tmp_path / ".build" / "lock"
    with held_lock(path, "another run"):
        for what in ("another conversion", "a download"):
            assert refusal(path, what) == (
                f"{tmp_path}: {what} is running here (process {os.getpid()} on {os.uname().nodename}); "
                "wait for it or stop it"
            )
    assert issubclass(BusyError, MoedockError)


def test_a_refused_one_changes_nothing(tmp_path):
    path = tmp_path / "state" / "lock"
    with held_lock(path, "another run"):
        before = path.read_bytes()
        refusal(path)
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == ["lock"]
        refusal(path)  # nor did it free the lock


def test_it_is_free_afterwards_even_after_an_error(tmp_path):
    path = tmp_path / "state" / "lock"
    with held_lock(path, "another run"):
        pass
    with pytest.raises(KeyError), held_lock(path, "another run"):
        raise KeyError
    assert_free(path)


def test_locks_of_two_folders_do_not_meet(tmp_path):
    with held_lock(tmp_path / "one" / "lock", "another run"):
        assert_free(tmp_path / "other" / "lock")


def test_what_a_dead_holder_wrote_is_replaced(tmp_path):
    path = tmp_path / "state" / "lock"
    path.parent.mkdir()
    path.write_text("1234567 on a machine with a long name, and more than one line\n" * 3)
    assert_free(path)


def test_a_holder_that_did_not_write_its_name_yet(tmp_path):
    path = tmp_path / "state" / "lock"
    path.parent.mkdir()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "(process unknown)" in refusal(path)


def test_the_death_of_the_holder_frees_it(tmp_path):
    """Killed outright, while a process that it started lives on."""
    path = tmp_path / "state" / "lock"
    with holder(path) as process:
        assert f"(process {process.pid} on " in refusal(path)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert_free(path)
        with held_lock(path, "another run"), pytest.raises(subprocess.CalledProcessError) as second:
            subprocess.run(
                [sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, check=True, capture_output=True, text=True
            )
    assert re.search(rf"BusyError: .* \(process {os.getpid()} on ", second.value.stderr)


@pytest.mark.parametrize("remove", [Path.unlink, lambda path: shutil.rmtree(path.parent)], ids=["file", "folder"])
def test_a_lock_that_went_while_it_was_opened_is_not_held(tmp_path, monkeypatch, remove: Callable[[Path], None]):
    """The holder finished and took its folder with it; a lock on a file that nobody else finds protects nothing."""
    path, real_flock = tmp_path / "state" / "lock", fcntl.flock

    def flock(file: object, operation: int) -> None:
        remove(path)
        real_flock(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(container.lock.fcntl, "flock", flock)
        refusal(path)
    assert_free(path)

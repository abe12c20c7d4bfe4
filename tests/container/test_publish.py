"""Publication: real processes are killed at every step; the final name is absent (or the old file) or whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from container import publish
from container.publish import obstacle, publish_bytes, publishing, remove_leftovers

REPOSITORY = Path(__file__).parents[2]
N_BYTES = 300_000  # several times the file buffer
WHOLE = b"\xa5" * N_BYTES

CHILD = """
import os, signal, sys
from pathlib import Path
from container.publish import publishing

step, target = sys.argv[1], Path(sys.argv[2])
real_fsync, real_replace, n_syncs = os.fsync, Path.replace, 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fsync(descriptor):
    global n_syncs
    n_syncs += 1
    name = ("file", "folder")[n_syncs - 1]
    if step == f"before fsync of the {name}":
        die()
    real_fsync(descriptor)
    if step == f"after fsync of the {name}":
        die()

def replace(self, other):
    if step == "before rename":
        die()
    real_replace(self, other)
    if step == "after rename":
        die()

os.fsync, Path.replace = fsync, replace
with publishing(target) as file:
    if step == "before the first byte":
        die()
    for n in range(3):
        file.write(b"\\xa5" * 100_000)
        if step == f"after part {n}":
            die()
die()
"""

# in the order in which they happen; from the rename on the new file must be there
STEPS = [
    "before the first byte", "after part 0", "after part 1", "after part 2",
    "before fsync of the file", "after fsync of the file", "before rename", "after rename",
    "before fsync of the folder", "after fsync of the folder",
]  # fmt: skip
PUBLISHED_FROM = STEPS.index("after rename")


def run_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "replacing"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_leaves_the_old_or_the_whole(tmp_path, step, old):
    target = tmp_path / "trunk.bin"
    if old is not None:
        target.write_bytes(old)
    child = run_child(CHILD, step, str(target))
    assert child.returncode == -signal.SIGKILL, child.stderr
    published = STEPS.index(step) >= PUBLISHED_FROM
    found = target.read_bytes() if target.exists() else None
    assert found == (WHOLE if published else old)
    leftovers = [path for path in tmp_path.iterdir() if path != target]
    assert len(leftovers) == (0 if published else 1)
    assert remove_leftovers(tmp_path) == [path.name for path in leftovers]
    assert list(tmp_path.iterdir()) == ([target] if found is not None else [])


def test_file_then_rename_then_folder(tmp_path, monkeypatch):
    """The order makes a power cut harmless: no name before its bytes, no end of the call before the name."""
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").resolve()
        calls.append("fsync folder" if target == tmp_path else f"fsync {target.suffix} of {target.stat().st_size}")
        real_fsync(descriptor)

    def replace(self: Path, other: Path) -> Path:
        calls.append("rename")
        return real_replace(self, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    publish_bytes(tmp_path / "a", WHOLE)
    assert calls == [f"fsync {publish.TEMPORARY_SUFFIX} of {N_BYTES}", "rename", "fsync folder"]
    assert (tmp_path / "a").read_bytes() == WHOLE


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path, error):
    target = tmp_path / "a"
    with pytest.raises(error), publishing(target) as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []
    target.write_bytes(b"old")
    with pytest.raises(error), publishing(target) as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failing_step_leaves_nothing(tmp_path, monkeypatch, failing):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[failing], fail)
    with pytest.raises(OSError, match="No space left"):
        publish_bytes(tmp_path / "a", WHOLE)
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from container.publish import publishing

# Python ignores SIGXFSZ, so writing beyond the limit fails as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
try:
    with publishing(Path(sys.argv[1])) as file:
        for _ in range(3):
            file.write(b"x" * 100_000)
except OSError as error:
    print(type(error).__name__, error.errno)
"""


def test_a_full_disk_leaves_nothing(tmp_path):
    child = run_child(FULL_DISK, str(tmp_path / "a"))
    assert (child.returncode, child.stdout.split()) == (0, ["OSError", "27"]), child.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        publish_bytes(tmp_path / "absent" / "a", b"")


def test_two_writers_do_not_meet(tmp_path):
    with publishing(tmp_path / "a") as first, publishing(tmp_path / "a") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "a").read_bytes() == b"first"  # the outer block ends last
    assert len(list(tmp_path.iterdir())) == 1


def test_leftovers_are_told_from_everything_else(tmp_path):
    for name in (".trunk.bin.0123abcd.tmp", "trunk.bin", ".hidden", "x.tmp"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".folder.tmp").mkdir()
    assert remove_leftovers(tmp_path) == [".trunk.bin.0123abcd.tmp"]
    assert {path.name for path in tmp_path.iterdir()} == {"trunk.bin", ".hidden", "x.tmp", ".folder.tmp"}


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert obstacle(pipe) is not None
    with pytest.raises(OSError, match="no file"):
        publish_bytes(pipe, b"x")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]

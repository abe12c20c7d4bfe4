"""A disk that is really full, where the tests may mount a small one; otherwise a limit on the size of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.convert.small import REPOSITORY, assert_same, run_cli

# The command without its look at the free space, which would refuse at once.
UNCHECKED = """
import sys
import convert.preflight
from convert.__main__ import main

if __name__ == "__main__":
    convert.preflight.free_disk = lambda folder: 1 << 60
    sys.exit(main(sys.argv[1:]))
"""

LIMITED = """
import resource, sys
from convert.__main__ import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
"""


def run_script(tmp_path, code, *arguments) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def small_disk(tmp_path):
    """A function that gives a tmpfs its size (KiB); mounted first, then resized."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def resize(n_kib: int):
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={n_kib}k"
        try:
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        mounted = True
        return folder

    yield resize
    if mounted:
        subprocess.run(["umount", folder], check=True)


# trunk.bin takes 1,020 KiB, a bank 32 KiB, a layer's codebooks 37 KiB: full at the start, and amid the layers
@pytest.mark.parametrize("n_kib", [512, 1090])
def test_a_full_disk(tmp_path, small_disk, k3, n_kib):
    output = small_disk(n_kib) / "out"
    done = run_script(tmp_path, UNCHECKED, k3.source, output, "--workers", "2", "--quality", "fast")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"error: {output}: the disk is full (")
    assert message.endswith("finished layers are kept. Make room and run the same command to continue")
    assert not (output / "manifest.json").exists()
    small_disk(200 << 10)
    resumed = run_cli(k3.source, output, "--workers", "2", "--quality", "fast")
    assert resumed.returncode == 0, resumed.stderr
    assert_same(output, k3.files)


def test_the_space_is_counted_before(small_disk, k3):
    output = small_disk(1024) / "out"
    done = run_cli(k3.source, output, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "disk: " in done.stderr
    assert not output.exists()


def test_files_that_may_not_grow(tmp_path, k3):
    """RLIMIT_FSIZE: the same way out, in the system's own words."""
    done = run_script(tmp_path, LIMITED, 500_000, k3.source, tmp_path / "out", "--workers", "2", "--quality", "fast")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"error: {tmp_path / 'out'}: File too large; run the same command to continue"]
    resumed = run_cli(k3.source, tmp_path / "out", "--workers", "2", "--json")
    assert json.loads(resumed.stdout)["complete"] is True
    assert_same(tmp_path / "out", k3.files)

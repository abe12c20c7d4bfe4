"""Real processes killed, interrupted and locked out: no survivor, a plain message, and the same bytes in the end."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoints import k3_config
from tests.convert.small import Converted, assert_same, converted, run_cli
from tests.crash.processes import Running, kill_one

GONE_SECONDS = 2.0
KILLED_WORKER = "a worker process died (SIGKILL) at work on"


def finish(expected: Converted, output: Path) -> None:
    """The same command again completes, with the bytes of an uninterrupted run."""
    done = run_cli(expected.source, output, "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert_same(output, expected.files)


def at_work(run: Running) -> None:
    """Wait until both workers are inside a MoE layer."""
    run.wait_for_jobs("outside-1", "outside-2", "L0")
    time.sleep(0.1)


def no_traceback(stderr: str) -> None:
    assert "Traceback" not in stderr, stderr


def test_the_parent_is_killed(tmp_path, long_k3):
    with Running(long_k3.source, tmp_path / "out") as run:
        at_work(run)
        assert len(run.workers()) == 2
        run.signal(signal.SIGKILL)
        assert run.seconds_until_nobody_is_left() < GONE_SECONDS
    finish(long_k3, tmp_path / "out")


def test_a_worker_is_killed(tmp_path, long_k3):
    with Running(long_k3.source, tmp_path / "out") as run:
        at_work(run)
        kill_one(max(run.workers()))  # started last, which the pool itself is slow to notice
        code, stdout, stderr = run.finish(seconds=20)
        assert (code, stdout) == (1, "")
        no_traceback(stderr)
        message = stderr.splitlines()[-1]
        assert message.startswith(f"error: {KILLED_WORKER} layer ")
        assert message.count("layer 1") + message.count("layer 2") == 1
        assert "run the same command to continue" in message
        assert run.seconds_until_nobody_is_left() < GONE_SECONDS
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_all_workers_are_killed(tmp_path, long_k3):
    with Running(long_k3.source, tmp_path / "out") as run:
        at_work(run)
        for pid in run.workers():
            kill_one(pid)
        code, _, stderr = run.finish(seconds=20)
    assert code == 1
    assert KILLED_WORKER in stderr
    no_traceback(stderr)


@pytest.mark.parametrize("whom", ["group", "parent"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted(tmp_path, long_k3, number, whom):
    with Running(long_k3.source, tmp_path / "out") as run:
        at_work(run)
        (run.signal_all if whom == "group" else run.signal)(number)
        code, stdout, stderr = run.finish(seconds=20)
        assert (code, stdout) == (130, "")
        no_traceback(stderr)
        assert stderr.splitlines()[-1] == "interrupted; finished layers are kept, run the same command to continue"
        assert run.seconds_until_nobody_is_left() < GONE_SECONDS
    assert (tmp_path / "out" / ".build" / "done-L0.json").exists()
    if (number, whom) == (signal.SIGINT, "group"):
        finish(long_k3, tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_while_workers_start(tmp_path, k3, number):
    with Running(k3.source, tmp_path / "out") as run:
        run.wait_until(lambda: (tmp_path / "out" / ".build" / "lock").exists())
        run.signal_all(number) if number == signal.SIGINT else run.signal(number)
        code, stdout, stderr = run.finish(seconds=20)
        assert (code, stdout) == (130, "")
        no_traceback(stderr)
        assert run.seconds_until_nobody_is_left(limit=30) < 30


def test_two_runs_in_one_folder(tmp_path, long_k3):
    with Running(long_k3.source, tmp_path / "out") as run:
        at_work(run)
        run.signal_all(signal.SIGSTOP)  # it must not end before the second looks
        second = run_cli(long_k3.source, tmp_path / "out", "--workers", "1")
        run.signal_all(signal.SIGCONT)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.splitlines() == [
            f"error: {tmp_path / 'out'}: another conversion is running here (process {run.process.pid} on "
            f"{os.uname().nodename}); wait for it or stop it"
        ]
        code, _, stderr = run.finish()
    assert code == 0, stderr
    assert_same(tmp_path / "out", long_k3.files)


def strike(expected: Converted, output: Path, rng: random.Random, moment: float) -> None:
    """Start a conversion and kill the parent, or one worker, after `moment` seconds."""
    with Running(expected.source, output) as run:
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.005)
        workers = run.workers()
        if workers and rng.random() < 0.5:
            kill_one(rng.choice(workers))
            code, _, stderr = run.finish(seconds=30)
            assert code in (0, 1)  # 0: the work was done already
            no_traceback(stderr)
        else:
            run.signal(signal.SIGKILL)
        run.seconds_until_nobody_is_left()


def measured(expected: Converted, output: Path) -> float:
    """Seconds of an uninterrupted run."""
    start = time.monotonic()
    finish(expected, output)
    return time.monotonic() - start


def test_random_moments(tmp_path, k3):
    """One container, struck three times."""
    rng = random.Random(20)
    whole = measured(k3, tmp_path / "whole")
    for _ in range(3):
        strike(k3, tmp_path / "out", rng, rng.uniform(0.3, 0.8) * whole)
    finish(k3, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_random_moments(tmp_path):
    """Spread over the whole duration of a larger conversion, each in a container of its own."""
    expected = converted(tmp_path, k3_config())
    rng = random.Random(2026)
    whole = measured(expected, tmp_path / "whole")
    for n in range(20):
        strike(expected, tmp_path / f"out-{n}", rng, (n + rng.random()) / 20 * whole)
        finish(expected, tmp_path / f"out-{n}")

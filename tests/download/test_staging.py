"""The staging folder: shards in the order asked for, each once, never more of them than the bound, and a way out."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import download.staging
from container.errors import DownloadError, TransferError
from container.fingerprint import ShardFingerprint
from convert.feed import ShardFeed
from convert.order import Needs, job_order, least_staging, shard_order
from download.ledger import Ledger
from download.listing import RemoteFile
from download.staging import Staging
from tests.download.fake_mirror import LEAST_SHARD_BYTES, FakeMirror, waits_for
from tests.download.served import hasty

A, B, C, D = (f"{letter}.safetensors" for letter in "abcd")
SIZES = {A: 1000, B: 2000, C: 3000, D: 4000}
WAIT_SECONDS = 10.0

Make = Callable[..., tuple[Staging, FakeMirror]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Staging over a fake mirror, closed at the end."""
    made: list[Staging] = []

    def staging(most_bytes: int, sizes: dict[str, int] = SIZES, mirror: FakeMirror | None = None) -> Any:
        mirror = mirror or FakeMirror(tmp_path / "staging", sizes)
        made.append(Staging(mirror, hasty(), most_bytes, tmp_path / "out"))  # type: ignore[arg-type]
        return made[-1], mirror

    yield staging
    for each in made:
        each.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("staging")] == []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def settled(mirror: FakeMirror, n_begun: int) -> list[str]:
    """What was begun, once it is `n_begun`, and after a while in which more might have been."""
    wait_until(lambda: len(mirror.begun) >= n_begun)
    time.sleep(0.05)
    return mirror.begun


def test_a_shard_waits_until_it_fits(make):
    staging, mirror = make(5000)
    staging.begin([A, B, C, D], [])
    assert settled(mirror, 2) == [A, B] or mirror.begun == [B, A]
    assert staging.held == {A, B}
    wait_until(lambda: staging.here(A) and staging.here(B))
    staging.give_back(A)  # 2,000 bytes are there, C makes 5,000
    assert settled(mirror, 3)[2:] == [C]
    staging.give_back(B)
    assert settled(mirror, 3)[2:] == [C]  # D would make 7,000
    wait_until(lambda: staging.here(C))
    staging.give_back(C)
    assert settled(mirror, 4)[3:] == [D]
    wait_until(lambda: staging.here(D))
    assert max(mirror.held_bytes) <= 5000


def test_a_small_one_does_not_overtake(make):
    """Who works through the order would wait for the large one for ever."""
    staging, mirror = make(4500)
    staging.begin([B, D, A], [])
    wait_until(lambda: staging.here(B))
    assert settled(mirror, 1) == [B]
    staging.give_back(B)
    wait_until(lambda: staging.here(D))
    assert settled(mirror, 2) == [B, D]
    staging.give_back(D)
    wait_until(lambda: staging.here(A))


def test_one_at_a_time_in_order(make, monkeypatch):
    monkeypatch.setattr(download.staging, "CONNECTIONS", 1)
    staging, mirror = make(10_000)
    staging.begin([C, A, D, B], [])
    assert settled(mirror, 4) == [C, A, D, B]


def test_two_at_a_time(make):
    staging, mirror = make(10_000)
    both = threading.Barrier(2, timeout=WAIT_SECONDS)
    mirror.before = lambda file: both.wait() and None
    staging.begin([A, B, C, D], [])
    wait_until(lambda: all(map(staging.here, SIZES)))


def test_what_an_earlier_run_left(make, tmp_path):
    """Proved shards are here; others and parts take their whole size; what nobody needs goes first of all."""
    mirror = FakeMirror(tmp_path / "staging", SIZES)
    mirror.put(A, proved=True)
    mirror.put(B)
    mirror.put_part(C, 10)
    mirror.put_part(D, 20)
    staging, _ = make(7000, mirror=mirror)
    assert staging.held == {A, B, C, D}
    assert staging.bytes_on_disk == 1000 + 2000 + 10 + 20
    assert staging.here(A)
    assert not any(map(staging.here, (B, C, D)))
    staging.begin([A, B, C], [D])
    wait_until(lambda: staging.here(B) and staging.here(C))
    assert mirror.begun == [C]
    assert mirror.read == [B]  # for its checksum, once
    assert staging.held == {A, B, C}
    assert not mirror.folder.part(D).exists()
    assert not mirror.folder.part_facts(D).exists()
    assert mirror.ledger.proved.keys() == {A, B, C}


def test_what_is_no_shard_makes_room(make, tmp_path):
    mirror = FakeMirror(tmp_path / "staging", SIZES)
    mirror.folder.file(A).write_bytes(bytes(SIZES[A]))
    there: list[bool] = []
    mirror.before = lambda file: there.append(mirror.folder.file(A).exists())
    staging, _ = make(1000, mirror=mirror)
    staging.begin([A], [])
    wait_until(lambda: staging.here(A))
    assert there == [False]


def test_giving_back(make, tmp_path):
    staging, mirror = make(10_000)
    staging.begin([A, B], [])
    wait_until(lambda: staging.here(A) and staging.here(B))
    staging.give_back(A)
    assert not staging.here(A)
    assert staging.held == {B}
    assert not mirror.folder.file(A).exists()
    gone = Ledger(mirror.folder.ledger).reclaimed
    assert {name: (one.n_bytes, one.into) for name, one in gone.items()} == {A: (1000, str(tmp_path / "out"))}
    staging.give_back(A)  # as after a crash: nothing happens
    assert staging.held == {B}


def test_the_ledger_comes_before_the_deletion(make, monkeypatch):
    """A kill in between leaves a shard that may go, not a hole that nobody knows of."""
    staging, mirror = make(10_000)
    staging.begin([A], [])
    wait_until(lambda: staging.here(A))
    known: list[bool] = []
    unlink = Path.unlink
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, **more: (known.append(A in Ledger(mirror.folder.ledger).reclaimed), unlink(path, **more))[1],
    )
    staging.give_back(A)
    assert known
    assert all(known)


def test_a_failure_ends_the_fetching(make):
    """What is on its way may still come; nothing else is begun."""
    staging, mirror = make(10_000)
    failed, go_on = threading.Event(), threading.Event()

    def before(file: RemoteFile) -> None:
        if file.name == A:
            failed.wait(WAIT_SECONDS)
            raise TransferError("a.safetensors: not today")
        go_on.wait(WAIT_SECONDS)

    mirror.before = before
    staging.begin([A, B, C, D], [])
    settled(mirror, 2)
    assert staging.failure() is None
    failed.set()
    wait_until(staging.failure)
    go_on.set()
    wait_until(lambda: staging.here(B))
    assert sorted(settled(mirror, 2)) == [A, B]
    assert str(staging.failure()) == "a.safetensors: not today"
    assert any("fetching has ended" in line for line in staging.news())


@pytest.mark.parametrize("filename", [None, "/elsewhere/ledger.jsonl"])
def test_a_disk_that_fails(make, filename):
    staging, mirror = make(10_000)

    def before(file: RemoteFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", filename)

    mirror.before = before
    staging.begin([A], [])
    wait_until(staging.failure)
    error = staging.failure()
    assert isinstance(error, DownloadError)
    assert str(error) == (
        f"staging {filename or mirror.folder.folder}: No space left on device; what was fetched is kept, run the same "
        "command to continue"
    )


def test_a_defect_of_ours_is_no_silence(make):
    staging, mirror = make(10_000)

    def before(file: RemoteFile) -> None:
        raise ZeroDivisionError

    mirror.before = before
    staging.begin([A, B], [])
    wait_until(staging.failure)
    assert isinstance(staging.failure(), ZeroDivisionError)


@pytest.mark.parametrize(
    ("free_bytes", "fails"), [((256 << 20) + 999, True), ((256 << 20) + 1000, False)], ids=["too little", "enough"]
)
def test_some_of_the_disk_stays_free(make, monkeypatch, free_bytes, fails):
    monkeypatch.setattr(download.staging, "free_disk", lambda folder: free_bytes)
    staging, mirror = make(10_000)
    staging.begin([A], [])
    wait_until(lambda: staging.failure() or staging.here(A))
    assert (staging.failure() is not None) == fails
    if fails:
        assert str(staging.failure()).startswith(
            f"{mirror.folder.folder}: only 256.0 MiB free, 1000 B of a shard still"
        )


@pytest.mark.parametrize("digest", ["header_sha256", "sample_sha256"])
def test_another_shard_than_the_one_expected(make, tmp_path, digest):
    """The checksum is right, but the build was begun by another header or other weights."""
    mirror = FakeMirror(tmp_path / "staging", SIZES)
    known = mirror.ledger.sampled[A].to_json()
    mirror.ledger.say_sampled(A, ShardFingerprint.from_json(known | {digest: "0" * 64}))
    staging, _ = make(10_000, mirror=mirror)
    staging.begin([A], [])
    wait_until(staging.failure)
    assert not staging.here(A)
    assert str(staging.failure()).startswith(f"{mirror.folder.file(A)}: its header or its weights are not those")


def test_closing_while_a_shard_waits_for_room(make):
    staging, mirror = make(3500)
    staging.begin([A, B, C], [])
    settled(mirror, 2)
    begin = time.monotonic()
    staging.close()
    assert time.monotonic() - begin < 1
    assert staging.failure() is None


def test_closing_while_shards_come(make):
    staging, mirror = make(10_000)
    mirror.before = waits_for(staging._transfer.stop)
    staging.begin([A, B, C], [])
    assert sorted(settled(mirror, 2)) == [A, B]
    begin = time.monotonic()
    staging.close()
    assert time.monotonic() - begin < 1
    assert staging.failure() is None
    assert not staging.here(A)


def test_closing_before_the_beginning(make):
    staging, _ = make(10_000)
    staging.close()


def test_nothing_to_fetch(make, tmp_path):
    mirror = FakeMirror(tmp_path / "staging", SIZES)
    mirror.put(A, proved=True)
    staging, _ = make(1000, mirror=mirror)
    staging.begin([A], [])
    assert staging._threads == []
    assert staging.here(A)


def test_news(make, monkeypatch):
    staging, mirror = make(10_000)
    go_on = threading.Event()
    mirror.before = lambda file: go_on.wait(WAIT_SECONDS) and None
    staging.begin([D], [])
    settled(mirror, 1)
    assert staging.news() == []
    monkeypatch.setattr(download.staging, "SAY_SECONDS", 0.0)
    assert staging.news() == [f"fetching {D}: 2.0 KiB of 3.9 KiB here"]
    staging._transfer.hitches[D] = "HTTP 503"
    assert staging.news() == [f"fetching {D}: 2.0 KiB of 3.9 KiB here; asking again after: HTTP 503"]
    go_on.set()
    wait_until(lambda: staging.here(D))
    (line,) = staging.news()
    assert line.startswith(f"fetched {D}: 3.9 KiB in 0 s (")
    staging.give_back(D)
    assert staging.news() == [f"gave back {D}: 3.9 KiB"]
    assert staging.news() == []


@st.composite
def needs_of_jobs(draw: st.DrawFn) -> Needs:
    """A few jobs that read a few shards each, contiguous as in a release or anyhow."""
    n_shards = draw(st.integers(1, 7))
    names = [f"s{n}.safetensors" for n in range(n_shards)]
    sizes = {name: LEAST_SHARD_BYTES * draw(st.integers(1, 5)) for name in names}
    one = st.tuples(st.integers(0, n_shards - 1), st.integers(1, 3)).map(lambda at: names[at[0] : at[0] + at[1]])
    some = one | st.lists(st.sampled_from(names), min_size=1, max_size=3)
    jobs = draw(st.lists(some, min_size=1, max_size=7))
    return Needs({f"job {n}": frozenset(shards) for n, shards in enumerate(jobs)}, sizes)


@given(needs_of_jobs(), st.integers(0, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_work_never_waits_in_vain(tmp_path_factory, needs, slack, n_workers, rng):
    """With the least bound: everything comes, once, and no more is held. Killed once, it goes on where it was."""
    folder = tmp_path_factory.mktemp("staging")
    mirror = FakeMirror(folder, needs.sizes)
    bound = least_staging(needs, job_order(needs, list(needs.shards), set()), set())[0] + slack * LEAST_SHARD_BYTES
    n_kill = rng.randrange(len(needs.shards) + 1)
    left = worked_through(mirror, folder, needs, bound, n_workers, rng, n_kill)
    assert max(mirror.held_bytes) <= bound
    if n_kill < len(needs.shards):
        done = needs.all_shards - left.all_shards
        fetched = [name for name in mirror.begun if mirror.folder.file(name).exists()]
        order = job_order(left, list(left.shards), set(fetched))
        again = FakeMirror(folder, needs.sizes)
        bound = max(bound, least_staging(left, order, set(fetched))[0])  # of scattered shards another order needs more
        assert not worked_through(again, folder, left, bound, n_workers, rng, len(left.shards)).shards
        assert done.isdisjoint(again.begun)
        assert set(fetched).isdisjoint(again.begun)
        assert max(again.held_bytes, default=0) <= bound
        mirror.begun += again.begun
    assert sorted(mirror.begun) == sorted(needs.all_shards)
    assert list(folder.glob("*.safetensors")) == []


def worked_through(
    mirror: FakeMirror, folder: Path, needs: Needs, bound: int, n_workers: int, rng: Any, n_jobs: int
) -> Needs:
    """Do `n_jobs` jobs, several at once, ending in any order. Returns what the others need."""
    staging = Staging(mirror, hasty(), bound, folder.with_name("out"))  # type: ignore[arg-type]
    order = job_order(needs, list(needs.shards), staging.held)
    feed = ShardFeed(staging, needs, order, {job: n for n, job in enumerate(needs.shards)})  # type: ignore[arg-type]
    ids, left, running = list(needs.shards), dict(needs.shards), list[int]()
    staging.begin(shard_order(needs, order), staging.held - needs.all_shards)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(needs.shards) - len(left) < n_jobs:
            if len(running) < n_workers and (number := feed.take()) is not None:
                running.append(number)
            elif running:
                feed.finished(number := running.pop(rng.randrange(len(running))))
                del left[ids[number]]
            assert time.monotonic() < deadline, (needs, bound)
    finally:
        staging.close()
    return Needs(left, needs.sizes)

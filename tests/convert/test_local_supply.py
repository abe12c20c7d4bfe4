"""A checkpoint folder as a supply: which shards must be there, which may go, and what is said when they may not."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from container.errors import ShardError, SourceError
from container.fingerprint import ShardFingerprint
from convert.local_supply import LocalSupply
from convert.options import ConvertOptions, Reclaim
from convert.order import Needs
from convert.prepare import prepare
from download.folder import SourceFolder
from download.ledger import Ledger, Origin, Proof, Reclaimed
from tests.convert.reclaiming import write_straddling
from tests.convert.small import EMBEDDING, edit_json, shard_of

ORIGIN = Origin("org/name", "c" * 40)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    return write_straddling(tmp_path_factory.mktemp("straddling") / "checkpoint")


@pytest.fixture
def source(tmp_path, made) -> Path:
    return Path(shutil.copytree(made, tmp_path / "source"))


def supply_of(source: Path, reclaim: Reclaim = Reclaim.ON, output: Path | None = None) -> LocalSupply:
    return LocalSupply(ConvertOptions(source=source, output=output or source.parent / "out", reclaim=reclaim))


def needs_of(supply: LocalSupply, *jobs: str) -> Needs:
    """What the named jobs read; without names, what all do."""
    prepared = prepare(supply._options, supply)
    return prepared.needs(job for job in prepared.plan.jobs if not jobs or job.id in jobs)


NOTHING = Needs({}, {})


def ledger_of(source: Path) -> Ledger:
    return Ledger(SourceFolder(source).ledger)


def prove(source: Path, *shards: Path, n_bytes: int | None = None) -> None:
    ledger = ledger_of(source)
    for shard in shards:
        ledger.say_proved(Proof(shard.name, shard.stat().st_size if n_bytes is None else n_bytes, "0" * 64))


def give_away(source: Path, shard: Path, into: Path) -> None:
    """Let an earlier conversion have given a shard back."""
    supply = supply_of(source, output=into)
    supply.begin(needs_of(supply), [])
    supply.give_back(shard.name)
    assert not shard.exists()


def one(problems: list[str]) -> str:
    (problem,) = problems
    return problem


@pytest.mark.parametrize("reclaim", Reclaim)
def test_a_whole_checkpoint(source, reclaim):
    supply = supply_of(source, reclaim)
    assert supply.problems(needs_of(supply)) == []
    assert supply.held == set(supply.checkpoint.shard_names)
    assert supply.shard_bytes == {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    assert (supply.gives_back, supply.fetches) == (reclaim is Reclaim.ON, False)
    assert supply.notes(NOTHING) == []
    assert supply.failure() is None


@pytest.mark.parametrize("reclaim", Reclaim)
def test_an_incomplete_checkpoint(source, reclaim):
    """Even where no job of this run would read the shard: nobody knows what was in it."""
    shard = shard_of(source, EMBEDDING)
    shard.unlink()
    supply = supply_of(source, reclaim)
    assert one(supply.problems(NOTHING)) == f"shard {shard}: missing; download it"


def test_a_shard_that_was_given_back_and_is_not_needed(source):
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    for reclaim in Reclaim:
        supply = supply_of(source, reclaim)
        assert supply.problems(NOTHING) == []
        assert not supply.here(shard.name)
        assert shard.name in supply.shard_bytes


@pytest.mark.parametrize("reclaim", Reclaim)
def test_a_shard_that_was_given_back_and_is_needed(source, reclaim):
    """The message names the shard, who needs it, and what to do; fetching all that was given back is not it."""
    shard = shard_of(source, EMBEDDING)
    into = source.parent / "out"
    give_away(source, shard, into)
    supply = supply_of(source, reclaim)
    assert one(supply.problems(needs_of(supply, "L0", "outside-1"))) == (
        f"shard {shard}: was given back when all that is made of it was safe in {into}, but outside-1 must be "
        "converted again: what is there does not hold, or is gone. To get the shard back run "
        f"`python -m download REPO {source} --include {shard.name}`"
    )
    elsewhere = supply_of(source, reclaim, source.parent / "elsewhere")
    found = one(elsewhere.problems(needs_of(elsewhere)))
    assert found.startswith(f"shard {shard}: was given back when all that is made of it was safe in {into}, but ")
    assert (
        "this run needs it for outside-1, L2; name that folder as OUT, or get the shard back run `python -m download"
        in found
    )


def test_only_some_of_many_jobs_are_named(source):
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    needs = Needs({f"L{n}": frozenset({shard.name}) for n in range(90)}, {shard.name: 1})
    assert "but L0, L1, L2 and 87 more must be converted again" in one(supply_of(source).problems(needs))


def test_a_ledger_that_lost_a_fingerprint(source):
    """Without it the shard that is gone is no part of any known checkpoint."""
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    ledger = SourceFolder(source).ledger
    lines = [line for line in ledger.read_bytes().splitlines(keepends=True) if b'"sampled"' not in line]
    ledger.write_bytes(b"".join(lines))
    assert one(supply_of(source).problems(NOTHING)) == f"shard {shard}: missing; download it"


@pytest.mark.parametrize("how", ["CRLF", "half a line", "rubbish", "no last newline"])
def test_a_ledger_that_was_through_something(source, how):
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    ledger = SourceFolder(source).ledger
    data = ledger.read_bytes()
    ledger.write_bytes(
        {
            "CRLF": data.replace(b"\n", b"\r\n"),
            "half a line": data + b'{"event": "reclaimed", "fi',
            "rubbish": b"\x00\xff\n[]\n" + data + b'{"event": 3}\n',
            "no last newline": data.rstrip(b"\n"),
        }[how]
    )
    supply = supply_of(source)
    assert supply.problems(NOTHING) == []
    other = next(iter(sorted(supply.held)))
    supply.give_back(other)
    assert set(ledger_of(source).reclaimed) == {shard.name, other}
    assert supply_of(source).problems(NOTHING) == []


def test_a_shard_that_came_back(source, made):
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    shutil.copy(made / shard.name, shard)
    supply = supply_of(source)
    assert supply.here(shard.name)
    assert supply.problems(needs_of(supply)) == []
    assert supply.begin(NOTHING, []) == []  # nobody needs it
    assert not shard.exists()


def test_a_shard_that_came_back_in_part(source, made):
    """Its kept header is not believed any more."""
    shard = shard_of(source, EMBEDDING)
    give_away(source, shard, source.parent / "out")
    assert supply_of(source).checkpoint.shard(shard.name).file_bytes == (made / shard.name).stat().st_size
    shard.write_bytes((made / shard.name).read_bytes()[:-1])
    with pytest.raises(ShardError, match=f"{shard}: .*truncated, download it again"):
        supply_of(source).checkpoint.shard(shard.name)


def test_only_proved_shards_are_trusted(source):
    """Once a download keeps the folder's ledger. What is not needed may be anything."""
    shards = sorted(source.glob("*.safetensors"))
    assert supply_of(source).problems(needs_of(supply_of(source))) == []
    ledger_of(source).say_source(ORIGIN)
    prove(source, *shards[1:])
    supply = supply_of(source)
    command = f"run `python -m download org/name {source} --revision {'c' * 40}`"
    unproved = f"shard {shards[0]}: was not proved by the download that keeps this folder's ledger; {command}"
    assert supply.problems(needs_of(supply)) == [unproved]
    assert supply.problems(NOTHING) == []
    prove(source, shards[0], n_bytes=5)
    size = shards[0].stat().st_size
    found = supply_of(source).problems(needs_of(supply))
    assert found == [f"shard {shards[0]}: has {size} bytes, 5 were proved; {command}"]
    prove(source, shards[0])
    assert supply_of(source).problems(needs_of(supply)) == []
    give_away(source, shards[-1], source.parent / "out")
    ledger_of(source).say_disproved(shards[0].name)
    found = supply_of(source).problems(needs_of(supply, "L0"))
    assert one(found).endswith(
        f"`python -m download org/name {source} --revision {'c' * 40} --include {shards[0].name}`"
    )


def hard_link(shard: Path) -> str:
    os.link(shard, shard.parent.parent / "second")
    return "has 2 hard links"


def link(shard: Path) -> str:
    shard.rename(shard.parent.parent / "weights")
    shard.symlink_to(shard.parent.parent / "weights")
    return "is a link to"


def unnamed_tensor(shard: Path) -> str:
    def forget(index):
        index["weight_map"][EMBEDDING] = next(path.name for path in shard.parent.glob("*.safetensors") if path != shard)

    edit_json(shard.parent / "model.safetensors.index.json", forget)
    return f"holds '{EMBEDDING}', which the index does not name"


@pytest.mark.parametrize("spoil", [hard_link, link, unnamed_tensor])
def test_what_must_not_be_deleted(source, spoil):
    shard = shard_of(source, EMBEDDING)
    what = spoil(shard)
    assert supply_of(source, Reclaim.OFF).problems(NOTHING) == []
    for reclaim in (Reclaim.DRY, Reclaim.ON):
        assert one(supply_of(source, reclaim).problems(NOTHING)).startswith(f"{shard}: {what}")


def test_a_read_only_folder(source, monkeypatch):
    """As the system tells: tests may run as root, whom no permission stops."""
    give_away(source, shard_of(source, EMBEDDING), source.parent / "out")  # no matter any more
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != source)
    found = supply_of(source).problems(NOTHING)
    expected = [
        f"{path}: in a read-only folder, so --reclaim cannot delete it" for path in source.glob("*.safetensors")
    ]
    assert found == sorted(expected)
    assert supply_of(source, Reclaim.OFF).problems(NOTHING) == []


def test_the_beginning_gives_back_what_nobody_needs(source):
    """And keeps before that what must be known of it."""
    supply = supply_of(source)
    needs = needs_of(supply, "L0", "L1")
    gone = set(supply.checkpoint.shard_names) - needs.all_shards
    assert gone
    assert supply.begin(needs, ["L1", "L0"]) == ["L1", "L0"]  # one by one both can start at once
    assert supply.held == needs.all_shards
    assert set(ledger_of(source).reclaimed) == gone
    assert set(ledger_of(source).sampled) == set(supply.checkpoint.shard_names)
    assert [line.split(":")[0] for line in supply.news()] == [f"gave back {shard}" for shard in sorted(gone)]
    assert supply.news() == []
    again = supply_of(source)
    assert again.checkpoint.shard(min(gone)).tensors.keys() == supply.checkpoint.shard(min(gone)).tensors.keys()
    assert again.fingerprints == supply.fingerprints


@pytest.mark.parametrize("reclaim", [Reclaim.OFF, Reclaim.DRY])
def test_without_reclaim_nothing_goes_and_nothing_is_written(source, reclaim):
    before = sorted(source.rglob("*"))
    supply = supply_of(source, reclaim)
    supply.begin(needs_of(supply, "L0"), ["L0"])
    supply.give_back(shard_of(source, EMBEDDING).name)
    assert sorted(source.rglob("*")) == before
    said = supply.news()
    if reclaim is Reclaim.DRY:
        assert said
        assert all(line.startswith("would give back model-") for line in said)
    else:
        assert said == []


def test_a_blob_that_went_before_its_link(tmp_path, made):
    """A crash between the two; the link then leads nowhere."""
    snapshot, blobs = (
        tmp_path / "models--org--name" / "snapshots" / ("1" * 40),
        tmp_path / "models--org--name" / "blobs",
    )
    shutil.copytree(made, snapshot)
    blobs.mkdir()
    for shard in snapshot.glob("*.safetensors"):
        blob = Path(shutil.move(shard, blobs / shard.name.replace("-", "")))
        shard.symlink_to(Path("../../blobs") / blob.name)
    output = tmp_path / "out"
    supply = supply_of(snapshot, output=output)
    assert supply.origin == Origin("org/name", "1" * 40)
    supply.begin(needs_of(supply), [])
    shard = shard_of(snapshot, EMBEDDING)
    ledger_of(snapshot).say_reclaimed(Reclaimed(shard.name, shard.stat().st_size, str(output)))
    shard.resolve().unlink()
    for reclaim in Reclaim:
        supply = supply_of(snapshot, reclaim, output)
        assert supply.problems(NOTHING) == []
        assert "but outside-1 must be" in one(supply.problems(needs_of(supply, "L0", "outside-1")))
        if reclaim is not Reclaim.ON:
            supply.begin(NOTHING, [])
        assert shard.is_symlink()
    supply.begin(NOTHING, [])
    assert list(snapshot.glob("*.safetensors")) == list(blobs.iterdir()) == []


def test_a_shard_that_somebody_took_away(source, made):
    """Also one that had been given back before, and came back."""
    shards = sorted(source.glob("*.safetensors"))
    give_away(source, shards[1], source.parent / "out")
    shutil.copy(made / shards[1].name, source)
    supply = supply_of(source)
    supply.begin(needs_of(supply), [])
    supply.give_back(shards[0].name)
    assert supply.failure() is None
    shards[1].unlink()
    with pytest.raises(SourceError, match=rf"shard {shards[1]}: was here when .* is gone now; put it back and run the"):
        raise supply.failure()
    shards[2].unlink()
    assert f"{shards[1]}: was here when the conversion began and is gone now, and 1 more; " in str(supply.failure())


Room = namedtuple("Room", "reclaim same expected")


@pytest.mark.parametrize(
    "room",
    [
        Room(Reclaim.OFF, True, 900),
        Room(Reclaim.DRY, True, 900),
        Room(Reclaim.ON, True, 70),
        Room(Reclaim.ON, False, 900),
    ],
)
def test_room(source, monkeypatch, room):
    """Deleted shards make room only where they really are."""
    monkeypatch.setattr("convert.local_supply.same_disk", lambda one, other: room.same)
    assert supply_of(source, room.reclaim).room(NOTHING, 900, 70) == room.expected
    assert supply_of(source, room.reclaim).room(NOTHING, 60, 70) == min(room.expected, 60)


def test_room_where_the_blobs_are(tmp_path, source, monkeypatch):
    """Shards may lie on another disk than the folder that names them."""
    elsewhere = tmp_path / "another disk"
    elsewhere.mkdir()
    shard = shard_of(source, EMBEDDING)
    shutil.move(shard, elsewhere / shard.name)
    shard.symlink_to(elsewhere / shard.name)
    monkeypatch.setattr("convert.local_supply.same_disk", lambda one, other: one != elsewhere)
    assert supply_of(source).room(NOTHING, 900, 70) == 900


def test_known_fingerprints_are_those_of_the_ledger(source):
    ledger = ledger_of(source)
    ledger.say_sampled("model-x.safetensors", ShardFingerprint(5, "a" * 64, "b" * 64))
    supply = supply_of(source)
    assert supply.fingerprints == {"model-x.safetensors": ShardFingerprint(5, "a" * 64, "b" * 64)}
    assert supply.shard_bytes["model-x.safetensors"] == 5

"""Whole conversions that delete their source: same bytes, no shard too early, and a way back from everything."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

import convert.jobs
import convert.run
from container.errors import BuildError, BusyError, PreflightError, SourceError, UsageError
from container.lock import held_lock
from convert.options import ConvertOptions, Reclaim
from convert.prepare import dry_run
from convert.quality import Quality
from tests.checkpoints import write_checkpoint
from tests.convert.reclaiming import (
    Consumers,
    reclaimed_lines,
    shards_here,
    small_files,
    write_straddling,
)
from tests.convert.small import Converted, assert_same, contents, convert_here, small_k3
from tests.download.small_model import REPOSITORY
from tests.download.small_model import run_cli as run_download
from tests.hub import HubServer

pytestmark = pytest.mark.usefixtures("in_this_process")

# The checkpoint's shards are read by: 1 by L0 and L1, 2 by L1, 3 by L1 and L2, 4 by L2 and outside-1.
SHARDS = tuple(f"model-{number:05d}-of-000004.safetensors" for number in range(1, 5))


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> Converted:
    """A checkpoint whose layers straddle its shards, converted while nothing was deleted. Not to be changed."""
    folder = tmp_path_factory.mktemp("kept")
    source = write_straddling(folder / "checkpoint", num_experts=2)
    summary, log = convert_here(source, folder / "container", workers=1)
    return Converted(
        small_k3(num_experts=2), source, folder / "container", summary, log, contents(folder / "container")
    )


@pytest.fixture
def source(tmp_path, kept) -> Path:
    return Path(shutil.copytree(kept.source, tmp_path / "source"))


def reclaim(source: Path, output: Path, **options):
    """A conversion that deletes its source, by one worker."""
    return convert_here(source, output, **{"workers": 1, "reclaim": Reclaim.ON, **options})


def assert_finished(source: Path, output: Path, kept: Converted) -> None:
    assert_same(output, kept.files)
    assert shards_here(source) == set()
    assert small_files(source) == small_files(kept.source)
    assert {path.name for path in source.iterdir() if path.is_dir()} == {".moedock"}


def interrupted(source: Path, output: Path, monkeypatch, **options) -> None:
    """All jobs done, nothing assembled."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert.run, "assemble", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reclaim(source, output, **options)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_on(tmp_path, source, kept):
    summary, log = reclaim(source, tmp_path / "out")
    assert (summary.complete, summary.n_jobs_done) == (True, 4)
    assert_finished(source, tmp_path / "out", kept)
    assert reclaimed_lines(source) == list(SHARDS)
    said = [line.split(":")[0] for line in log.splitlines()]
    gone = [said.index(f"gave back {shard}") for shard in SHARDS]
    assert said.index("layer 1") < gone[0]
    assert gone[2] < said.index("layer 2") + 3
    assert [line for line in said if line.startswith("gave back")] == [f"gave back {shard}" for shard in SHARDS]


def test_off_and_dry_leave_the_source_alone(tmp_path, source, kept):
    before = contents(source)
    for how in (Reclaim.OFF, Reclaim.DRY):
        _, log = reclaim(source, tmp_path / how.value, reclaim=how)
        assert_same(tmp_path / how.value, kept.files)
        assert contents(source) == before
        said = [line.split(":")[0] for line in log.splitlines() if "give back" in line]
        assert said == ([] if how is Reclaim.OFF else [f"would give back {shard}" for shard in SHARDS])


def test_a_container_that_was_complete_before(tmp_path, source, kept):
    """It is not proved, so nothing goes; but that is said."""
    reclaim(source, tmp_path / "out", reclaim=Reclaim.OFF)
    summary, _ = reclaim(source, tmp_path / "out")
    assert summary.already_complete
    (note,) = (note for note in summary.notes if "still holds" in note)
    assert (
        note
        == f"{source} still holds 4 shard(s): {tmp_path / 'out'} was complete before this run, so nothing was deleted"
    )
    assert shards_here(source) == set(SHARDS)


def test_again_when_all_is_done(tmp_path, source, kept):
    reclaim(source, tmp_path / "out")
    for how in Reclaim:
        summary, _ = reclaim(source, tmp_path / "out", reclaim=how)
        assert summary.already_complete
        assert summary.notes == kept.summary.notes
    assert_finished(source, tmp_path / "out", kept)


@pytest.mark.parametrize("before", Reclaim)
def test_pieces(tmp_path, source, kept, before):
    """A shard goes only with its last reader, in whatever run that is; earlier runs may have kept them."""
    output, consumers = tmp_path / "out", Consumers(kept.source, kept.output)
    left = set(SHARDS)
    for layers, gone in (({0}, set()), ({1}, {SHARDS[0], SHARDS[1]})):
        summary, _ = reclaim(source, output, layers=frozenset(layers), reclaim=before)
        assert not summary.complete
        left -= gone if before is Reclaim.ON else set()
        assert shards_here(source) == left
        consumers.assert_safe(source, output)
    summary, log = reclaim(source, output, layers=frozenset({1}))  # done already: only gives back
    assert summary.n_jobs_done == 0
    assert shards_here(source) == {SHARDS[2], SHARDS[3]}
    assert (f"gave back {SHARDS[0]}: " in log) == (before is not Reclaim.ON)
    consumers.assert_safe(source, output)
    reclaim(source, output)
    assert_finished(source, output, kept)


@pytest.mark.parametrize("after", Reclaim)
def test_nothing_is_left_but_assembling(tmp_path, source, kept, monkeypatch, after):
    """However the last run is told to treat shards that are gone."""
    interrupted(source, tmp_path / "out", monkeypatch)
    assert shards_here(source) == set()
    summary, _ = reclaim(source, tmp_path / "out", reclaim=after)
    assert (summary.complete, summary.n_jobs_done) == (True, 0)
    assert_finished(source, tmp_path / "out", kept)


def test_damage_found_before_shards_go(tmp_path, source, kept):
    """An earlier run kept the shards; what it made is proved before they are deleted."""
    reclaim(source, tmp_path / "out", layers=frozenset({0, 1}), reclaim=Reclaim.OFF)
    flip(tmp_path / "out" / "experts-L1.bin")
    summary, log = reclaim(source, tmp_path / "out")
    assert summary.n_jobs_done == 3
    assert "layer 1: " in next(line for line in log.splitlines() if "converting it again" in line)
    assert_finished(source, tmp_path / "out", kept)


def lose_a_bank(output: Path) -> None:
    flip(output / "experts-L1.bin")


def lose_a_record(output: Path) -> None:
    (output / ".build" / "done-L1.json").unlink()


def lose_codebooks(output: Path) -> None:
    flip(output / ".build" / "codebooks-L1.bin")


@pytest.mark.parametrize(
    ("lose", "how"),
    [
        (lose_a_bank, Reclaim.ON),
        (lose_a_bank, Reclaim.OFF),
        (lose_a_record, Reclaim.DRY),
        (lose_codebooks, Reclaim.ON),
    ],
)
def test_damage_found_when_shards_are_gone(tmp_path, source, kept, lose, how):
    """The error names every shard to get, and who needs it; with them the same command finishes."""
    output = tmp_path / "out"
    reclaim(source, output, layers=frozenset({0, 1}))
    lose(output)
    for _ in range(2):
        with pytest.raises((BuildError, PreflightError)) as caught:
            reclaim(source, output, reclaim=how)
        lines = [line for line in str(caught.value).splitlines() if "was given back" in line]
        assert len(lines) == 2
        for line, shard in zip(lines, SHARDS, strict=False):
            assert f"shard {source / shard}: was given back when all that is made of it was safe in {output}" in line
            assert "but L1 must be converted again" in line
            assert line.endswith(f"run `python -m download REPO {source} --include {shard}`")
        assert shards_here(source) == {SHARDS[2], SHARDS[3]}
    for shard in SHARDS[:2]:
        shutil.copy(kept.source / shard, source)
    summary, _ = reclaim(source, output)
    assert summary.n_jobs_done == 3  # layer 1, and the two that were left
    assert_finished(source, output, kept)


def test_the_command_that_gets_a_shard_back(tmp_path, kept):
    """As the message gives it; what was given back beside it is not fetched again."""
    source, output = tmp_path / "source", tmp_path / "out"
    with HubServer() as hub:
        hub.add(REPOSITORY, kept.source)
        assert run_download(hub, tmp_path / "home", REPOSITORY, source).returncode == 0
        reclaim(source, output, layers=frozenset({0, 1, 2}))
        assert shards_here(source) == {SHARDS[3]}
        flip(output / "experts-L2.bin")
        with pytest.raises(BuildError) as caught:
            reclaim(source, output)
        (line,) = str(caught.value).splitlines()
        command = line.split("`")[1]
        assert command.startswith(f"python -m download {REPOSITORY} {source} --revision ")
        done = run_download(hub, tmp_path / "home", *command.split()[3:])
        assert done.returncode == 0, done.stderr
        assert shards_here(source) == {SHARDS[2], SHARDS[3]}
    reclaim(source, output)
    assert_finished(source, output, kept)


def test_an_output_that_does_not_hold_right_away(tmp_path, source, kept, monkeypatch):
    """The disk gives back other bytes than were written: nothing is deleted for them."""
    left = [1]

    def forget(path: Path) -> None:
        if path.name == "experts-L1.bin" and left:
            left.pop()
            flip(path)

    monkeypatch.setattr(convert.jobs, "forget_cached", forget)
    with pytest.raises(BuildError, match=r"experts-L1\.bin does not match its checksum, right after it was written"):
        reclaim(source, tmp_path / "out")
    assert shards_here(source) == set(SHARDS)
    assert not (tmp_path / "out" / ".build" / "done-L1.json").exists()
    reclaim(source, tmp_path / "out")
    assert_finished(source, tmp_path / "out", kept)


def test_shards_that_came_back(tmp_path, source, kept):
    """All of them, whether anybody needs them or not."""
    reclaim(source, tmp_path / "out", layers=frozenset({0, 1}))
    for shard in SHARDS:
        shutil.copy(kept.source / shard, source)
    reclaim(source, tmp_path / "out")
    assert_finished(source, tmp_path / "out", kept)
    assert set(reclaimed_lines(source)) == set(SHARDS)


def test_a_foreign_shard_in_the_place_of_one_that_is_gone(tmp_path, source, kept):
    """It is not the one that the container was begun with."""
    reclaim(source, tmp_path / "out", layers=frozenset({0, 1}))
    data = bytearray((kept.source / SHARDS[0]).read_bytes())
    data[-100_000:] = bytes(100_000)
    (source / SHARDS[0]).write_bytes(data)
    with pytest.raises(BuildError, match=rf"source\.shards\.{SHARDS[0]}\.sample_sha256: there "):
        reclaim(source, tmp_path / "out")
    assert SHARDS[0] in shards_here(source)
    (source / SHARDS[0]).unlink()
    reclaim(source, tmp_path / "out")
    assert_finished(source, tmp_path / "out", kept)


def test_one_file_without_an_index(tmp_path, monkeypatch):
    """When it is gone, the kept header alone knows the tensors' names."""
    source = write_checkpoint(tmp_path / "checkpoint", small_k3(num_experts=2), single_file=True)
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    convert_here(source, tmp_path / "expected", workers=1)
    reclaim(copy, tmp_path / "out", layers=frozenset({1}))
    assert shards_here(copy) == {"model.safetensors"}
    interrupted(copy, tmp_path / "out", monkeypatch)
    assert shards_here(copy) == set()
    reclaim(copy, tmp_path / "out")
    assert_same(tmp_path / "out", contents(tmp_path / "expected"))
    assert reclaim(copy, tmp_path / "out")[0].already_complete
    assert reclaimed_lines(copy) == ["model.safetensors"]


def test_the_folders_names_do_not_matter(tmp_path, source, kept, monkeypatch):
    """A link, a relative path, then another place for both."""
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "out").mkdir()
    (tmp_path / "to out").symlink_to(tmp_path / "out")
    reclaim(tmp_path / "link", tmp_path / "to out", layers=frozenset({0}))
    monkeypatch.chdir(tmp_path)
    reclaim(Path("source/"), Path("out/"), layers=frozenset({1}))
    assert shards_here(source) == {SHARDS[2], SHARDS[3]}
    source.rename(tmp_path / "moved")
    (tmp_path / "out").rename(tmp_path / "moved out")
    reclaim(tmp_path / "moved", tmp_path / "moved out")
    assert_finished(tmp_path / "moved", tmp_path / "moved out", kept)


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_the_hubs_cache(tmp_path, kept, absolute):
    """Links go with their blobs; small files and other revisions' blobs stay."""
    repository = tmp_path / "models--org--name"
    snapshot, other, blobs = (repository / name for name in ("snapshots/1", "snapshots/2", "blobs"))
    for folder in (snapshot, other, blobs):
        folder.mkdir(parents=True)
    for number, path in enumerate(sorted(kept.source.iterdir())):
        blob = blobs / f"{number:040x}"
        shutil.copy(path, blob)
        for folder in (snapshot,) if path.suffix == ".safetensors" else (snapshot, other):
            (folder / path.name).symlink_to(blob if absolute else Path("../../blobs") / blob.name)
    (blobs / "other").write_bytes(b"other weights")
    (other / SHARDS[0]).symlink_to(blobs / "other")
    reclaim(snapshot, tmp_path / "out", layers=frozenset({0, 1}))
    assert shards_here(snapshot) == {SHARDS[2], SHARDS[3]}
    reclaim(snapshot, tmp_path / "out")
    assert_finished(snapshot, tmp_path / "out", kept)
    assert len(list(blobs.iterdir())) == len(small_files(kept.source)) + 1
    assert (other / SHARDS[0]).read_bytes() == b"other weights"


def hard_link(source: Path) -> None:
    (source.parent / "second").hardlink_to(source / SHARDS[2])


def remove(source: Path) -> None:
    (source / SHARDS[2]).unlink()


def link_elsewhere(source: Path) -> None:
    (source / SHARDS[2]).rename(source.parent / "weights")
    (source / SHARDS[2]).symlink_to(source.parent / "weights")


@pytest.mark.parametrize("how", [Reclaim.ON, Reclaim.DRY])
@pytest.mark.parametrize("spoil", [hard_link, remove, link_elsewhere])
def test_refused_before_anything_is_written(tmp_path, source, spoil, how):
    spoil(source)
    before = contents(source)
    with pytest.raises(PreflightError, match=SHARDS[2]):
        reclaim(source, tmp_path / "out", reclaim=how)
    assert not (tmp_path / "out").exists()
    assert {name: data for name, data in contents(source).items() if name != ".moedock/lock"} == before


@pytest.mark.parametrize("place", ["source/out", "source", ".", "link/out"])
def test_source_and_output_inside_each_other(tmp_path, source, place):
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UsageError, match="must not lie inside each other"):
        ConvertOptions(source=source, output=tmp_path / place, reclaim=Reclaim.ON)


def test_another_container_of_a_source_that_is_gone(tmp_path, source, kept):
    reclaim(source, tmp_path / "out")
    with pytest.raises(PreflightError) as caught:
        reclaim(source, tmp_path / "second", seed=1)
    assert str(caught.value).count(f"was safe in {tmp_path / 'out'}, but this run needs it for ") == 4
    assert not (tmp_path / "second").exists()
    assert_finished(source, tmp_path / "out", kept)


def test_other_options_delete_nothing(tmp_path, source):
    reclaim(source, tmp_path / "out", layers=frozenset({0, 1}), reclaim=Reclaim.OFF)
    with pytest.raises(BuildError, match=r"options\.seed: there 0, now 1"):
        reclaim(source, tmp_path / "out", seed=1)
    assert shards_here(source) == set(SHARDS)


def test_a_source_in_use(tmp_path, source, kept):
    """By a download, or by another conversion that deletes it."""
    with held_lock(source / ".moedock" / "lock", "a download"):
        with pytest.raises(BusyError, match=f"{source}: a download or another conversion is running here"):
            reclaim(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        reclaim(source, tmp_path / "other", reclaim=Reclaim.DRY)
    assert_same(tmp_path / "other", kept.files)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", Reclaim)
def test_a_shard_that_somebody_removes_meanwhile(tmp_path, source, kept, monkeypatch, how):
    """The jobs that need it cannot wait for ever."""
    real = convert.jobs.convert_job

    def first_remove(job, progress):
        (source / SHARDS[2]).unlink(missing_ok=True)
        return real(job, progress)

    with monkeypatch.context() as patch:
        patch.setattr(convert.run, "convert_job", first_remove)
        with pytest.raises(SourceError, match=rf"shard {source / SHARDS[2]}: was here when the conversion began"):
            reclaim(source, tmp_path / "out", reclaim=how)
    assert shards_here(source) == {SHARDS[0], SHARDS[1], SHARDS[3]}
    shutil.copy(kept.source / SHARDS[2], source)
    reclaim(source, tmp_path / "out")
    assert_finished(source, tmp_path / "out", kept)


def planned(source: Path, output: Path, how: Reclaim) -> dict[str, Any]:
    options = ConvertOptions(source=source, output=output, reclaim=how, workers=1, quality=Quality.FAST)
    return dry_run(options, io.StringIO())


def test_a_dry_run_writes_nothing(tmp_path, source, kept):
    before = contents(source)
    assert planned(source, tmp_path / "out", Reclaim.ON)["problems"] == []
    assert contents(source) == before
    reclaim(source, tmp_path / "out", layers=frozenset({0, 1}))
    before = contents(source)
    plan = planned(source, tmp_path / "out", Reclaim.ON)
    assert (plan["problems"], plan["shards_absent"], plan["names_only"]) == ([], 2, False)
    assert contents(source) == before


def test_less_room_is_needed(tmp_path, source, kept, monkeypatch):
    """A disk that would be too small for source and container together, by half of what goes in time."""
    whole, less = (planned(source, tmp_path / "out", how)["room_bytes"] for how in (Reclaim.OFF, Reclaim.ON))
    assert less < whole
    monkeypatch.setattr("convert.preflight.free_disk", lambda folder: (less + whole) // 2)
    for how in (Reclaim.OFF, Reclaim.DRY):
        with pytest.raises(PreflightError, match="disk: "):
            reclaim(source, tmp_path / "out", reclaim=how)
    reclaim(source, tmp_path / "out")
    assert_finished(source, tmp_path / "out", kept)

"""Finished work is proved before it is trusted: whatever was damaged meanwhile is repeated, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import container.lock
import convert.run
from container.errors import BuildError, BusyError, MismatchError
from container.manifest import Manifest
from convert.build import BuildFolder
from tests.checkpoints import checkpoint_tensors
from tests.convert.small import (
    EMBEDDING,
    assert_same,
    contents,
    convert_here,
    run_cli,
    serial_work,
    small_k3,
    write_small,
)

pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(scope="module")
def jobs_finished(tmp_path_factory, k3) -> Path:
    """An output folder in which every job is finished and nothing is assembled. Not to be changed."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    output = tmp_path_factory.mktemp("unassembled") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert.run, "run_work", serial_work)
        patch.setattr(convert.run, "assemble", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_here(k3.source, output)
    assert len(list((output / ".build").glob("done-*.json"))) == 5
    return output


@pytest.fixture
def unassembled(tmp_path, jobs_finished) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(jobs_finished, tmp_path / "out"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip_trunk(output: Path, manifest: Manifest, name: str, place: str) -> None:
    (entry,) = (entry for entry in manifest.trunk if entry.name == name)
    offset = {"first": entry.offset, "last": entry.offset + entry.n_bytes - 1}[place]
    flip(output / ".build" / "trunk.bin", offset)


def test_nothing_is_repeated_without_damage(k3, unassembled):
    summary, log = convert_here(k3.source, unassembled)
    assert (summary.n_jobs_done, summary.complete) == (0, True)
    assert log == "5 of 5 jobs were finished before; proving them\nassembling the container\n"
    assert summary.relative_error == pytest.approx(k3.summary.relative_error)
    assert_same(unassembled, k3.files)


def record(text: bytes):
    return lambda output: (output / ".build" / "done-L1.json").write_bytes(text)


def edit_record(change):
    def damage(output: Path) -> None:
        path = output / ".build" / "done-L1.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return damage


def record_of_another_layer(output: Path) -> None:
    (output / ".build" / "done-L1.json").write_bytes((output / ".build" / "done-L2.json").read_bytes())


LAYER_1 = {
    "bank: first byte": lambda output: flip(output / "experts-L1.bin", 0),
    "bank: padding": lambda output: flip(output / "experts-L1.bin", -1),
    "bank: truncated": lambda output: truncate(output / "experts-L1.bin"),
    "bank: longer": lambda output: lengthen(output / "experts-L1.bin"),
    "bank: gone": lambda output: (output / "experts-L1.bin").unlink(),
    "bank: another layer's": lambda output: (output / "experts-L1.bin").write_bytes(
        (output / "experts-L2.bin").read_bytes()
    ),
    "codebooks: a byte": lambda output: flip(output / ".build" / "codebooks-L1.bin", 5000),
    "codebooks: truncated": lambda output: truncate(output / ".build" / "codebooks-L1.bin"),
    "codebooks: gone": lambda output: (output / ".build" / "codebooks-L1.bin").unlink(),
    "record: empty": record(b""),
    "record: no JSON": record(b"\x00\xff{"),
    "record: a list": record(b"[]"),
    "record: an empty object": record(b"{}"),
    "record: nested deeply": record(b'{"id": ' + b"[" * 100_000),
    "record: another layer's": record_of_another_layer,
    "record: no bank": edit_record(lambda value: value.update(bank=None)),
    "record: a strange bank": edit_record(lambda value: value.update(bank=[1, 2])),
    "record: another checksum": edit_record(lambda value: value["bank"].update(sha256="0" * 64)),
    "record: no trunk errors": edit_record(lambda value: value.update(trunk_errors={})),
    "record: no figures": edit_record(lambda value: value.update(experts=None)),
    "record: errors that are text": edit_record(lambda value: value["experts"]["errors"].update(up="x")),
    "record: another count": edit_record(lambda value: value["experts"]["usage"]["down"][2].__setitem__(0, 999)),
    "record: no seconds": edit_record(lambda value: value.pop("seconds")),
    "record: negative seconds": edit_record(lambda value: value["seconds"].update(read=-1.0)),
    "record: a trunk list": edit_record(lambda value: value.update(trunk_crc32=list(value["trunk_crc32"]))),
    "record: a tensor less": edit_record(lambda value: value["trunk_crc32"].popitem()),
}
NORM_1 = "language_model.model.layers.1.input_layernorm.weight"
ROUTER_1 = "language_model.model.layers.1.block_sparse_moe.gate.weight"
PATCHES = "vision_tower.patch_embed.proj.weight"
GATE_0 = "language_model.model.layers.0.mlp.gate_proj.weight"
TRUNK = [
    (NORM_1, "first", "layer 1"),
    (ROUTER_1, "last", "layer 1"),
    (GATE_0, "first", "layer 0"),
    (GATE_0, "last", "layer 0"),  # its scales
    (EMBEDDING, "first", f"{EMBEDDING} and 4 more outside the layers"),
    (PATCHES, "last", f"{PATCHES} and 11 more outside the layers"),
]


def assert_one_repeated(k3, output: Path, label: str) -> None:
    summary, log = convert_here(k3.source, output)
    assert (summary.n_jobs_done, summary.complete) == (1, True), log
    (line,) = (line for line in log.splitlines() if "converting it again" in line)
    assert line.startswith(f"{label}: ")
    assert_same(output, k3.files)


@pytest.mark.parametrize("what", LAYER_1)
def test_a_layer_is_repeated(k3, unassembled, what):
    LAYER_1[what](unassembled)
    assert_one_repeated(k3, unassembled, "layer 1")


@pytest.mark.parametrize(("name", "place", "label"), TRUNK)
def test_a_trunk_slice_is_repeated(k3, unassembled, name, place, label):
    flip_trunk(unassembled, Manifest.read(k3.output), name, place)
    assert_one_repeated(k3, unassembled, label)


@pytest.mark.parametrize("how", ["truncated", "gone", "empty"])
def test_a_lost_trunk_is_made_again(k3, unassembled, how):
    trunk = unassembled / ".build" / "trunk.bin"
    {"truncated": truncate, "gone": Path.unlink, "empty": lambda path: path.write_bytes(b"")}[how](trunk)
    summary, _ = convert_here(k3.source, unassembled)
    assert (summary.n_jobs_done, summary.complete) == (5, True)
    assert_same(unassembled, k3.files)


def test_damage_in_several_places(k3, unassembled):
    LAYER_1["bank: first byte"](unassembled)
    flip_trunk(unassembled, Manifest.read(k3.output), GATE_0, "first")
    summary, log = convert_here(k3.source, unassembled)
    assert (summary.n_jobs_done, log.count("converting it again")) == (2, 2)
    assert_same(unassembled, k3.files)


def test_damage_between_the_trunks_tensors(k3, unassembled):
    """No checksum of a job covers the gaps."""
    trunk = Manifest.read(k3.output).trunk
    (gap, *_) = [a.offset + a.n_bytes for a, b in pairwise(trunk) if a.offset + a.n_bytes < b.offset]
    flip(unassembled / ".build" / "trunk.bin", gap)
    summary, _ = convert_here(k3.source, unassembled)
    assert summary.n_jobs_done == 0
    assert_same(unassembled, k3.files)


def test_a_damaged_identity_is_refused(k3, unassembled):
    """Nobody knows any more what was being built; that is for the user to decide."""
    (unassembled / ".build" / "build.json").write_bytes(b"{")
    before = contents(unassembled)
    with pytest.raises(BuildError, match=r"build\.json: damaged; delete .*\.build to start this conversion anew"):
        convert_here(k3.source, unassembled)
    assert contents(unassembled) | {".build/lock": b""} == before | {".build/lock": b""}


def test_leftovers_are_swept(k3, unassembled):
    for path in (unassembled / ".experts-L1.bin.0a1b2c3d.tmp", unassembled / ".build" / ".done-L1.json.00000000.tmp"):
        path.write_bytes(b"half")
    convert_here(k3.source, unassembled)
    assert_same(unassembled, k3.files)


def test_a_bank_that_will_be_repeated_takes_no_room_meanwhile(k3, unassembled, monkeypatch):
    """The new bank is as large; on a disk that just holds the container both together would not fit."""
    (unassembled / ".build" / "done-L1.json").unlink()
    flip(unassembled / "experts-L2.bin", 0)
    seen = []

    def look(*_: object) -> None:
        seen.extend(path.name for path in unassembled.glob("experts-*"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert.run, "_work", look)
        with pytest.raises(KeyboardInterrupt):
            convert_here(k3.source, unassembled)
    assert seen == []
    convert_here(k3.source, unassembled)
    assert_same(unassembled, k3.files)


def other_source(tmp_path: Path) -> Path:
    return write_small(tmp_path / "other", checkpoint_tensors(small_k3(), seed=1))


@pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "complete"])
@pytest.mark.parametrize(
    ("options", "differences"),
    [
        ({"seed": 5}, ["options.seed: there 0, now 5"]),
        ({"trunk_bits": 8}, ["options.trunk_bits: there 4, now 8"]),
        ({"seed": 5, "trunk_bits": 8}, ["options.seed: there 0, now 5", "options.trunk_bits: there 4, now 8"]),
        ("source", [".sample_sha256: there "]),
        ("config", ["source.config_sha256: there "]),
    ],
)
def test_another_conversion_is_refused(request, tmp_path, k3, options, differences, finished):
    output = k3.output if finished else request.getfixturevalue("unassembled")
    before = contents(output)
    source, changes = k3.source, options if isinstance(options, dict) else {}
    if options == "source":
        source = other_source(tmp_path)
    if options == "config":
        source = write_small(tmp_path / "other", rms_norm_eps=1e-6)
    with pytest.raises(MismatchError) as refusal:
        convert_here(source, output, **changes)
    text = str(refusal.value)
    assert (
        f"{output}: begun with other options, library versions or another source; repeat the command as it was then"
        in text
    )
    for difference in differences:
        assert difference in text
    if isinstance(options, dict):
        assert len(text.splitlines()) == 1 + len(differences)
    assert contents(output) | {".build/lock": b""} == before | {".build/lock": b""}


def test_differences_are_not_listed_without_end(tmp_path, k3, unassembled):
    path = unassembled / ".build" / "build.json"
    identity = json.loads(path.read_text())
    identity["source"]["shards"] = {f"model-{n}.safetensors": {"bytes": n} for n in range(96)}
    path.write_text(json.dumps(identity))
    with pytest.raises(MismatchError) as refusal:
        convert_here(k3.source, unassembled)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 22
    assert lines[-1].startswith("  … and ")


def test_the_command_shows_the_difference(k3, unassembled):
    done = run_cli(k3.source, unassembled, "--seed", "3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[1:] == ["  - options.seed: there 0, now 3"]


def test_the_lock_names_its_holder(tmp_path):
    first, second = BuildFolder(tmp_path), BuildFolder(tmp_path)
    holder = rf"another conversion is running here \(process {os.getpid()} on {os.uname().nodename}\); wait for it"
    with first.locked(), pytest.raises(BusyError, match=holder), second.locked():
        pytest.fail("two runs hold one folder")
    with second.locked():
        pass


def test_a_stale_lock_is_recovered(tmp_path):
    """What a killed run leaves is a file; the kernel dropped the lock itself."""
    (tmp_path / ".build").mkdir()
    (tmp_path / ".build" / "lock").write_text("4711 on elsewhere\n")
    with BuildFolder(tmp_path).locked():
        assert "4711" not in (tmp_path / ".build" / "lock").read_text()


def test_a_lock_that_went_with_its_folder_is_not_held(tmp_path):
    """The holder finished and removed the folder while this run opened the file."""
    build = BuildFolder(tmp_path)
    real_flock = container.lock.fcntl.flock

    def flock(*arguments):
        real_flock(*arguments)
        build.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("container.lock.fcntl.flock", flock)
        with pytest.raises(BusyError), build.locked():
            pytest.fail("a deleted lock protects nothing")


def test_a_container_finished_meanwhile_is_left_alone(tmp_path, monkeypatch, k3):
    """The run that held the lock published the manifest after this one had looked for it."""
    output = tmp_path / "out"
    real_locked = BuildFolder.locked
    calls = []

    @contextmanager
    def locked(self):
        if not calls:
            shutil.copytree(k3.output, output)
        calls.append(1)
        with real_locked(self):
            yield

    monkeypatch.setattr(BuildFolder, "locked", locked)
    summary, _ = convert_here(k3.source, output)
    assert summary.already_complete
    assert_same(output, k3.files)


def test_a_kill_during_the_clean_up_is_cleared(tmp_path, k3):
    shutil.copytree(k3.output, tmp_path / "out")
    (tmp_path / "out" / ".build").mkdir()
    (tmp_path / "out" / ".build" / "done-L1.json").write_bytes(b"{}")
    summary, _ = convert_here(k3.source, tmp_path / "out")
    assert summary.already_complete
    assert_same(tmp_path / "out", k3.files)

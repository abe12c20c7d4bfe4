"""The trunk in memory: the bytes of the file, read in large pieces, checked on request."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from container.errors import FormatError, IntegrityError
from container.layout import ALIGNMENT, TRUNK_NAME, TrunkFormat
from container.manifest import TrunkEntry
from container.reader import ContainerReader
from runtime.compute.team import Team
from runtime.disk import resident
from runtime.disk.resident import Progress, ResidentTrunk
from runtime.memory.plan import merged_ranges, resident_entries
from runtime.trunk import Trunk
from tests.runtime.files import direct_files


def load(
    folder: Path, *, n_threads: int = 3, verify: bool = False, progress: Progress | None = None
) -> tuple[ContainerReader, ResidentTrunk]:
    with ContainerReader.open(folder) as reader, direct_files(folder) as files:
        return reader, ResidentTrunk.load(reader, files, n_threads=n_threads, verify=verify, progress=progress)


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        shutil.copyfile(path, to / path.name)
    return to


@pytest.mark.parametrize("family", ["k3", "kimi_linear"])
def test_tensors_are_the_file_s_bytes(family: str, request: pytest.FixtureRequest, monkeypatch) -> None:
    folder = request.getfixturevalue(family)
    monkeypatch.setattr(resident, "_PIECE_BYTES", 2 * ALIGNMENT)  # many pieces even here
    reader, trunk = load(folder, verify=True)
    content = np.fromfile(folder / TRUNK_NAME, dtype=np.uint8)
    entries = resident_entries(reader.manifest)
    assert len(entries) > 50
    for entry in entries:
        expected = content[entry.offset : entry.offset + entry.n_bytes]
        np.testing.assert_array_equal(trunk.content(entry), expected, err_msg=entry.name)


def test_ranges_lie_in_memory_as_in_the_file(k3: Path) -> None:
    reader, trunk = load(k3)
    ranges = merged_ranges(resident_entries(reader.manifest))
    for part in ranges:
        places = {trunk.content(entry).ctypes.data - entry.offset for entry in part.entries}
        assert len(places) == 1  # one piece of memory
        assert places.pop() % ALIGNMENT == 0


def test_what_is_not_resident_is_not_there(k3: Path) -> None:
    reader, trunk = load(k3)
    left_out = [entry for entry in reader.manifest.trunk if "vision" in entry.name or "embed_tokens" in entry.name]
    assert len(left_out) > 5
    for entry in left_out:
        with pytest.raises(FormatError, match="not in memory"):
            trunk.content(entry)


def test_progress_ends_at_all_bytes(k3: Path, monkeypatch) -> None:
    monkeypatch.setattr(resident, "_PIECE_BYTES", 16 * ALIGNMENT)
    told: list[tuple[int, int]] = []
    reader, _ = load(k3, progress=lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert all(one < other for one, other in itertools.pairwise(done))
    assert set(totals) == {done[-1]}
    needed = sum(entry.n_bytes for entry in resident_entries(reader.manifest))
    assert needed <= done[-1] <= needed + 2 * ALIGNMENT * len(told)


def test_a_flipped_byte_is_found_in_any_tensor(kimi_linear: Path, tmp_path: Path) -> None:
    folder = copy(kimi_linear, tmp_path / "damaged")
    with ContainerReader.open(folder) as reader:
        entries = resident_entries(reader.manifest)
    rng = np.random.default_rng(5)
    for entry in [entries[0], entries[-1], *rng.choice(np.array(entries, dtype=object), 6)]:
        place = entry.offset + int(rng.integers(entry.n_bytes))
        with (folder / TRUNK_NAME).open("r+b") as file:
            good = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([good[0] ^ 64]), place)
            with pytest.raises(IntegrityError, match=f"{entry.name}: crc32"):
                load(folder, verify=True)
            load(folder)  # without being asked, nothing is checked
            os.pwrite(file.fileno(), good, place)
    load(folder, verify=True)


def test_a_file_that_lost_its_end(kimi_linear: Path, tmp_path: Path) -> None:
    folder = copy(kimi_linear, tmp_path / "short")
    with ContainerReader.open(folder) as reader, direct_files(folder) as files:
        os.truncate(folder / TRUNK_NAME, reader.trunk_bytes - 1)  # after it was opened
        with pytest.raises(FormatError, match=r"trunk\.bin"):
            ResidentTrunk.load(reader, files, n_threads=2)
        os.truncate(folder / TRUNK_NAME, 10_000)
        with pytest.raises(FormatError, match=r"trunk\.bin"):
            ResidentTrunk.load(reader, files, n_threads=2)


@pytest.mark.parametrize("shift", [1, 2, 64])
def test_a_writer_that_aligns_nothing(k3: Path, tmp_path: Path, shift: int) -> None:
    """Every tensor moved by a few bytes: what a model sees is the same, whatever had to be copied for it."""
    folder = copy(k3, tmp_path / "shifted")
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["trunk"]:
        for key in ("off", "scale_off"):
            if key in entry:
                entry[key] += shift
    del manifest["files"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / TRUNK_NAME).write_bytes(bytes(shift) + (k3 / TRUNK_NAME).read_bytes())
    with opened(folder) as (reader, trunk), opened(k3) as (_, true):
        for entry in some_of_each_format(reader):
            name = entry.name.removeprefix("language_model.")
            np.testing.assert_array_equal(trunk.array(name), true.array(name))
            one, other = trunk.matrix(name), true.matrix(name)
            np.testing.assert_array_equal(one.values, other.values)
            np.testing.assert_array_equal(one.scales, other.scales)
            assert trunk.array(name).flags.aligned
            assert one.scales.flags.aligned
            assert entry.fmt is not TrunkFormat.F32 or one.values.ctypes.data % 4 == 0
        embedding = "model.embed_tokens.weight"
        rows = trunk.embedding(embedding).rows([3, 1, 3])
        np.testing.assert_array_equal(rows, true.embedding(embedding).rows([3, 1, 3]))


@contextmanager
def opened(folder: Path) -> Iterator[tuple[ContainerReader, Trunk]]:
    with ContainerReader.open(folder) as reader, direct_files(folder) as files, closing(Team(1)) as team:
        trunk = Trunk(reader, files, team=team)
        trunk.load()
        yield reader, trunk


def some_of_each_format(reader: ContainerReader) -> list[TrunkEntry]:
    entries = resident_entries(reader.manifest)
    return [entry for fmt in TrunkFormat for entry in [each for each in entries if each.fmt is fmt][:4]]

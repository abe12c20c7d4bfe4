"""Headers and fingerprints of shards that may go: kept once, trusted only whole."""

from __future__ import annotations

import json

import pytest

from container.checkpoint import Checkpoint
from container.fingerprint import file_fingerprint
from container.shards import read_shard_header
from download.folder import SourceFolder
from download.headers import keep_headers_here, kept_headers
from download.ledger import Ledger

SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")


def shard(tensors: dict[str, int], fill: bytes = b"\x01") -> bytes:
    """A safetensors file of U8 vectors with the sizes named."""
    header, end = {}, 0
    for name, n_bytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [n_bytes], "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + fill * end


@pytest.fixture
def folder(tmp_path) -> SourceFolder:
    """A checkpoint of two shards with two tensors each; a config is not looked into here."""
    found = SourceFolder(tmp_path / "source")
    found.folder.mkdir()
    found.file("config.json").write_text("{}")
    for number, name in enumerate(SHARDS):
        found.file(name).write_bytes(shard({f"a{number}": 100, f"b{number}": 50_000}))
    weight_map = {f"{letter}{number}": name for number, name in enumerate(SHARDS) for letter in "ab"}
    found.file("model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return found


def keep(folder: SourceFolder) -> Ledger:
    """Keep what is here, as a process would that knows of nothing before."""
    ledger = Ledger(folder.ledger)
    gone = [name for name in SHARDS if not folder.file(name).exists()]
    keep_headers_here(folder, ledger, Checkpoint.open(folder.folder, kept_headers(folder, ledger, gone)))
    return ledger


def kept(folder: SourceFolder, *shards: str) -> dict:
    return kept_headers(folder, Ledger(folder.ledger), shards or SHARDS)


def test_what_is_here_is_kept(folder):
    ledger = keep(folder)
    for name in SHARDS:
        header = read_shard_header(folder.file(name))
        assert kept(folder)[name] == header
        assert ledger.sampled[name] == file_fingerprint(folder.file(name), header)
        assert folder.header(name).read_bytes() == folder.file(name).read_bytes()[: header.data_offset]


def test_nothing_is_kept_at_first(folder):
    assert kept(folder) == {}
    assert not folder.state.exists()


def test_a_kept_header_outlives_its_shard(folder):
    keep(folder)
    before = kept(folder)
    for name in SHARDS:
        folder.file(name).unlink()
    ledger = keep(folder)
    assert kept(folder) == before
    assert set(ledger.sampled) == set(SHARDS)
    checkpoint = Checkpoint.open(folder.folder, kept(folder))
    assert checkpoint.entry("b1").n_bytes == 50_000
    assert kept(folder, SHARDS[1], "model-x.safetensors") == {SHARDS[1]: before[SHARDS[1]]}


def test_what_is_kept_is_not_written_again(folder):
    keep(folder)
    said, written = folder.ledger.read_bytes(), folder.header(SHARDS[0]).stat().st_ino
    keep(folder)
    assert folder.ledger.read_bytes() == said
    assert folder.header(SHARDS[0]).stat().st_ino == written


@pytest.mark.parametrize("what", ["weights", "names", "sizes"])
def test_another_shard_of_the_same_name(folder, what):
    """A revision that came meanwhile takes the first one's place."""
    keep(folder)
    other = {"weights": ({"a0": 100, "b0": 50_000}, b"\x02"), "names": ({"c0": 100, "b0": 50_000}, b"\x01")}
    tensors, fill = other.get(what, ({"a0": 101, "b0": 50_000}, b"\x01"))
    folder.file(SHARDS[0]).write_bytes(shard(tensors, fill))
    ledger = keep(folder)
    header = read_shard_header(folder.file(SHARDS[0]))
    assert kept(folder)[SHARDS[0]] == header
    assert Ledger(folder.ledger).sampled == ledger.sampled
    assert ledger.sampled[SHARDS[0]] == file_fingerprint(folder.file(SHARDS[0]), header)


def every_damage() -> list[tuple[str, object]]:
    return [
        ("a byte less", lambda data: data[:-1]),
        ("a byte more", lambda data: data + b" "),
        ("empty", lambda data: b""),
        ("a name that is as long", lambda data: data.replace(b'"a0"', b'"x0"')),
        ("the other shard's", lambda data: data.replace(b"0", b"1", 1)),
    ]


@pytest.mark.parametrize(("what", "damage"), every_damage(), ids=[what for what, _ in every_damage()])
def test_a_damaged_header_is_as_good_as_none(folder, what, damage):
    """Also one that could be parsed: tensors would be looked for where they never were."""
    keep(folder)
    path = folder.header(SHARDS[0])
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert set(kept(folder)) == {SHARDS[1]}
    keep(folder)  # the shard is here: mended
    assert path.read_bytes() == whole
    path.unlink()
    assert set(kept(folder)) == {SHARDS[1]}


def test_a_header_without_its_line_in_the_ledger(folder):
    """Killed between the two."""
    keep(folder)
    lines = folder.ledger.read_bytes().splitlines(keepends=True)
    folder.ledger.write_bytes(b"".join(lines[1:]))
    assert set(kept(folder)) == {SHARDS[1]}
    keep(folder)
    assert set(kept(folder)) == set(SHARDS)


def test_a_header_newer_than_its_line_in_the_ledger(folder):
    """Killed between the two, at another revision of the shard."""
    keep(folder)
    old = folder.ledger.read_bytes()
    folder.file(SHARDS[0]).write_bytes(shard({"c0": 100, "d0": 50_000}))
    keep(folder)
    folder.ledger.write_bytes(old)
    assert set(kept(folder)) == {SHARDS[1]}


def test_a_size_in_the_ledger_that_is_not_the_headers(folder):
    keep(folder)
    edited = folder.ledger.read_text().replace(f'"bytes": {folder.file(SHARDS[0]).stat().st_size}', '"bytes": 5', 1)
    folder.ledger.write_text(edited)
    assert set(kept(folder)) == {SHARDS[1]}


def test_only_what_is_here_is_kept(folder, tmp_path):
    """A shard that is missing, or a link to nowhere, has nothing to keep."""
    folder.file(SHARDS[0]).unlink()
    folder.file(SHARDS[0]).symlink_to(tmp_path / "nowhere")
    assert set(keep(folder).sampled) == {SHARDS[1]}

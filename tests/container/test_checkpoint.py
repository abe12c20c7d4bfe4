from __future__ import annotations

import contextlib
import errno
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from container import checkpoint as checkpoint_module
from container.checkpoint import Checkpoint, check_weight_map
from container.errors import ConfigError, ShardError, SourceError
from container.shards import read_shard_header
from tests import strategies

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(5, dtype=np.uint8)
WEIGHT_MAP = {"a": SHARDS[0], "b": SHARDS[1]}


def write(folder: Path, index: Any = None, *, gz: bool = False) -> Path:
    """Two shards with one tensor each; `index` replaces the index's content (an object, or bytes)."""
    save_file({"a": A}, folder / SHARDS[0])
    save_file({"b": B}, folder / SHARDS[1])
    (folder / "config.json").write_text('{"model_type": "x"}')
    data = index if isinstance(index, bytes) else json.dumps(index or {"weight_map": WEIGHT_MAP}).encode()
    (folder / (INDEX + ".gz" * gz)).write_bytes(gzip.compress(data) if gz and not isinstance(index, bytes) else data)
    return folder


@pytest.mark.parametrize("gz", [False, True])
def test_tensors_are_found_through_the_index(tmp_path, gz):
    checkpoint = Checkpoint.open(write(tmp_path, gz=gz))
    assert checkpoint.config == {"model_type": "x"}
    assert checkpoint.shard_names == list(SHARDS)
    assert "a" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.entry("a").shape == (3, 4)
    np.testing.assert_array_equal(checkpoint.read("a").view("<f4").reshape(3, 4), A)
    np.testing.assert_array_equal(checkpoint.read("b", 1, 3), B[1:4])
    np.testing.assert_array_equal(checkpoint.read("b", 2), B[2:])
    assert checkpoint.read("b", 5, 0).size == 0
    checkpoint.close()


def test_opening_touches_no_shard(tmp_path):
    """The plan of a model whose shards are elsewhere is made from names and config."""
    write(tmp_path)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.weight_map == WEIGHT_MAP
    with pytest.raises(ShardError, match=SHARDS[0]):
        checkpoint.entry("a")


def test_one_shard_needs_no_index(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.weight_map == {"a": "model.safetensors", "b": "model.safetensors"}
    np.testing.assert_array_equal(checkpoint.read("b"), B)
    checkpoint.close()


@pytest.mark.parametrize(("start", "n"), [(-1, 2), (0, 6), (5, 1), (6, 0), (2, -1)])
def test_ranges_outside_a_tensor_are_refused(tmp_path, start, n):
    with pytest.raises(ValueError, match=r"outside b \(5 bytes\)"):
        Checkpoint.open(write(tmp_path)).read("b", start, n)


def test_tensors_that_are_nowhere(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path, {"weight_map": {**WEIGHT_MAP, "c": SHARDS[0]}}))
    with pytest.raises(SourceError, match="tensor d is not in the weight map"):
        checkpoint.entry("d")
    with pytest.raises(ShardError, match=f"{SHARDS[0]}: tensor c is missing, though the index says"):
        checkpoint.entry("c")


def test_a_shard_that_shrinks_or_goes_while_open(tmp_path):
    checkpoint = Checkpoint.open(write(tmp_path))
    assert checkpoint.entry("a").n_bytes == 48
    (tmp_path / SHARDS[0]).write_bytes((tmp_path / SHARDS[0]).read_bytes()[:-7])
    with pytest.raises(ShardError, match="a: the file ended at byte"):
        checkpoint.read("a")
    assert checkpoint.entry("b").n_bytes == 5
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ShardError, match=f"{SHARDS[1]}: cannot be opened"):
        checkpoint.read("b")
    checkpoint.close()


def test_a_read_that_fails_names_shard_and_tensor(tmp_path, monkeypatch):
    """A bad sector is the source's, not the output folder's."""
    checkpoint = Checkpoint.open(write(tmp_path))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "from the test")

    monkeypatch.setattr("container.checkpoint.os.preadv", fail)
    with pytest.raises(ShardError, match=rf"{SHARDS[0]}: tensor a: byte \d+ of the file cannot be read \(.+\)"):
        checkpoint.read("a")
    checkpoint.close()


def test_no_checkpoint(tmp_path):
    with pytest.raises(SourceError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"is .* a Hugging Face checkpoint"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=f"neither {INDEX} nor model.safetensors found"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "a\0b", None, 1, ["a"], {"a": 1}, True],
    ids=repr,
)
def test_shards_outside_the_folder_are_refused(tmp_path, shard):
    with pytest.raises(SourceError, match=r"plain file name for tensor t, found") as caught:
        Checkpoint.open(write(tmp_path, {"weight_map": {**WEIGHT_MAP, "t": shard}}))
    assert INDEX in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"{", b'{"weight_map":' + b"[" * 100_000, {"x": 1}, {"weight_map": {}}, {"weight_map": []},
     b'{"a":1,"a":1}', b'{"weight_map":{"a":"\\ud800"}}'],
    ids=lambda index: str(index)[:20],
)  # fmt: skip
def test_bad_indices_are_refused(tmp_path, index):
    with pytest.raises(SourceError, match=INDEX):
        Checkpoint.open(write(tmp_path, index))


@given(st.data())
def test_damaged_gzip_is_refused_or_read(tmp_path, data):
    good = gzip.compress(json.dumps({"weight_map": WEIGHT_MAP}).encode())
    write(tmp_path, data.draw(strategies.damaged(good)), gz=True)
    with contextlib.suppress(SourceError):  # any other exception fails
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("gz", [False, True])
def test_an_index_without_end_is_not_unpacked(tmp_path, monkeypatch, gz):
    monkeypatch.setattr(checkpoint_module, "MAX_JSON_BYTES", 1 << 22)
    data = b'{"weight_map":{}' + b" " * (1 << 26)
    write(tmp_path, gzip.compress(data) if gz else data, gz=gz)
    del data
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="more than 4194304 bytes"):
            Checkpoint.open(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "[]", '{"a": NaN}', '{"a": 1, "a": 2}'])
def test_bad_configs_are_refused(tmp_path, text):
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        Checkpoint.open(tmp_path)


def test_headers_from_elsewhere_stand_in_for_shards(tmp_path):
    """What is known of a shard that went, or has not come yet."""
    write(tmp_path)
    headers = {SHARDS[0]: read_shard_header(tmp_path / SHARDS[0])}
    (tmp_path / SHARDS[0]).unlink()
    checkpoint = Checkpoint.open(tmp_path, headers)
    assert [checkpoint.has_shard(shard) for shard in SHARDS] == [False, True]
    assert [checkpoint.knows_shard(shard) for shard in SHARDS] == [True, True]
    assert checkpoint.shard(SHARDS[0]) is headers[SHARDS[0]]
    assert (checkpoint.entry("a").shape, checkpoint.entry("b").shape) == ((3, 4), (5,))
    with pytest.raises(ShardError, match=f"{SHARDS[0]}: cannot be opened"):
        checkpoint.read("a")
    np.testing.assert_array_equal(checkpoint.read("b"), B)
    assert list(headers) == [SHARDS[0]]  # what the checkpoint learns of others stays with it
    checkpoint.close()


def test_a_header_from_elsewhere_serves_once_the_shard_is_here(tmp_path):
    header = read_shard_header(write(tmp_path) / SHARDS[0])
    data = (tmp_path / SHARDS[0]).read_bytes()
    (tmp_path / SHARDS[0]).unlink()
    checkpoint = Checkpoint.open(tmp_path, {SHARDS[0]: header})
    (tmp_path / SHARDS[0]).write_bytes(data)
    assert checkpoint.has_shard(SHARDS[0])
    np.testing.assert_array_equal(checkpoint.read("a").view("<f4").reshape(3, 4), A)
    checkpoint.close()


def test_a_shard_that_nobody_knows(tmp_path):
    write(tmp_path)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    (tmp_path / SHARDS[1]).mkdir()  # whatever it is, it is there to be refused
    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.has_shard(shard) for shard in SHARDS] == [False, True]
    assert [checkpoint.knows_shard(shard) for shard in SHARDS] == [False, True]


def test_a_header_from_elsewhere_is_enough_for_a_single_shard(tmp_path):
    single = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, single)
    (tmp_path / "config.json").write_text("{}")
    header = read_shard_header(single)
    single.unlink()
    checkpoint = Checkpoint.open(tmp_path, {single.name: header})
    assert checkpoint.weight_map == {"a": single.name, "b": single.name}
    assert checkpoint.shard(single.name) is header
    assert not checkpoint.has_shard(single.name)
    with pytest.raises(SourceError, match="no weights here"):
        Checkpoint.open(tmp_path, {"model-00001-of-00001.safetensors": header})


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"t": "../x"}}, {"weight_map": {"t": None}}])
def test_a_weight_map_from_elsewhere_is_checked(index):
    with pytest.raises(SourceError, match=r"^the repository's index: `weight_map` "):
        check_weight_map(index, "the repository's index")
    assert check_weight_map({"weight_map": WEIGHT_MAP, "metadata": 1}, "") == WEIGHT_MAP

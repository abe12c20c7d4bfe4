"""A conversion reads every byte of every tensor exactly once, experts kept for training included."""

from __future__ import annotations

from collections import defaultdict

import pytest

from container.checkpoint import Checkpoint
from tests.checkpoints import k3_config, write_checkpoint
from tests.convert.small import convert_here, small_k3, small_kimi_linear


def spans(reads: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of reads in order of their start, neighbours joined; a repeated byte stays visible."""
    joined: list[tuple[int, int]] = []
    for start, n_bytes in sorted(reads):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + n_bytes)
        else:
            joined.append((start, start + n_bytes))
    return joined


@pytest.fixture
def reads(monkeypatch) -> dict[str, list[tuple[int, int]]]:
    """(start byte, bytes) of every read of every tensor part, by name."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    real_read = Checkpoint.read

    def read(self, name, start_byte=0, n_bytes=None):
        data = real_read(self, name, start_byte, n_bytes)
        found[name].append((start_byte, data.size))
        return data

    monkeypatch.setattr(Checkpoint, "read", read)
    return found


CONFIGS = {
    "K3, fewer experts than the sample": small_k3(),
    "K3, more experts than the sample": small_k3(num_experts=11),
    "Kimi-Linear": small_kimi_linear(),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("in_this_process")
def test_every_byte_once(tmp_path, reads, name):
    source = write_checkpoint(tmp_path / "checkpoint", CONFIGS[name])
    convert_here(source, tmp_path / "container")
    checkpoint = Checkpoint.open(source)
    assert set(reads) == set(checkpoint.weight_map)
    wrong = {part: spans(each) for part, each in reads.items() if spans(each) != [(0, checkpoint.entry(part).n_bytes)]}
    assert wrong == {}


@pytest.mark.usefixtures("in_this_process")
def test_large_tensors_are_read_in_strips(tmp_path, reads, monkeypatch):
    """With small strips every trunk matrix takes several reads, which still meet without overlap or gap."""
    monkeypatch.setattr("convert.trunk.STRIP_WEIGHTS", 1 << 12)
    source = write_checkpoint(tmp_path / "checkpoint", small_k3())
    convert_here(source, tmp_path / "container")
    checkpoint = Checkpoint.open(source)
    assert len(reads["language_model.lm_head.weight"]) == 640 * 128 // (1 << 12)
    wrong = {part: spans(each) for part, each in reads.items() if spans(each) != [(0, checkpoint.entry(part).n_bytes)]}
    assert wrong == {}


@pytest.mark.usefixtures("in_this_process")
def test_one_layer_reads_its_own_tensors_only(tmp_path, reads):
    source = write_checkpoint(tmp_path / "checkpoint", small_k3())
    convert_here(source, tmp_path / "container", layers=frozenset({1}))
    assert {name.split(".")[3] for name in reads} == {"1"}


@pytest.mark.usefixtures("in_this_process")
def test_strips_do_not_shape_the_container(tmp_path, monkeypatch, k3):
    """Memory is a question of strips, the bytes are not."""
    monkeypatch.setattr("convert.trunk.STRIP_WEIGHTS", 3 * 128)
    monkeypatch.setattr("convert.encode.STRIP_ROWS", 128)
    convert_here(k3.source, tmp_path / "container")
    assert (tmp_path / "container" / "trunk.bin").read_bytes() == k3.files["trunk.bin"]
    assert (tmp_path / "container" / "experts-L1.bin").read_bytes() == k3.files["experts-L1.bin"]


def test_the_small_models_are_what_these_tests_assume():
    assert small_k3()["text_config"]["num_experts"] < 8 < 11
    assert k3_config()["text_config"]["num_experts"] == 8

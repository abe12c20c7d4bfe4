from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from container.layout import VQ3R
from container.records import ExpertRecord, RecordLayout
from container.writer import BankWriter
from tests.containers import random_record

LAYOUT = RecordLayout(VQ3R, {"gate": (24, 16), "up": (24, 16), "down": (16, 24)})
RECORDS = [random_record(np.random.default_rng(n), LAYOUT, 1, n, 9) for n in range(3)]


def write(path, records: list[ExpertRecord], *, n_experts: int = 3) -> BankWriter:
    with BankWriter(path, LAYOUT, n_experts=n_experts) as bank:
        for record in records:
            bank.append(record)
    return bank


def test_a_whole_bank_is_published(tmp_path):
    path = tmp_path / "experts-L1.bin"
    entry = write(path, RECORDS).entry
    data = path.read_bytes()
    assert data == b"".join(bytes(record.pack(LAYOUT)) for record in RECORDS)
    assert entry.n_bytes == len(data) == 3 * LAYOUT.stride_bytes
    assert entry.sha256 == hashlib.sha256(data).hexdigest()


def test_nothing_is_visible_before_the_end(tmp_path):
    path = tmp_path / "experts-L1.bin"
    with BankWriter(path, LAYOUT, n_experts=3) as bank:
        for record in RECORDS:
            bank.append(record)
            assert not path.exists()
    assert path.exists()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1], "expert 1 is out of turn, expected 0"),
        ([0, 0], "expert 0 is out of turn, expected 1"),
        ([0, 2], "expert 2 is out of turn, expected 1"),
        ([0, 1, 2, 0], "expert 0 is out of turn"),
        ([], "0 of 3 records written"),
        ([0, 1], "2 of 3 records written"),
    ],
)
@pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "replacing"])
def test_wrong_order_and_number_leave_nothing(tmp_path, order, message, old):
    path = tmp_path / "experts-L1.bin"
    if old is not None:
        path.write_bytes(old)
    with pytest.raises(ValueError, match=message) as caught:
        write(path, [RECORDS[n] for n in order])
    assert str(path) in str(caught.value)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([] if old is None else [(path.name, old)])


def test_one_record_too_many_leaves_nothing(tmp_path):
    extra = dataclasses.replace(RECORDS[0], expert=3)
    with pytest.raises(ValueError, match="expert 3 is out of turn"):
        write(tmp_path / "experts-L1.bin", [*RECORDS, extra])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_block_is_the_one_that_is_seen(tmp_path):
    with pytest.raises(KeyError, match="mine"), BankWriter(tmp_path / "a", LAYOUT, n_experts=3) as bank:  # noqa: PT012
        bank.append(RECORDS[0])
        raise KeyError("mine")
    assert list(tmp_path.iterdir()) == []


def test_appending_needs_the_block(tmp_path):
    bank = BankWriter(tmp_path / "a", LAYOUT, n_experts=3)
    with pytest.raises(ValueError, match="expert 0"):
        bank.append(RECORDS[0])
    assert list(tmp_path.iterdir()) == []

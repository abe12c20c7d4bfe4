from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from container.errors import FormatError, IntegrityError
from container.layout import EXPERT_HEADER, VQ3R
from container.model import KINDS
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from tests import strategies
from tests.containers import random_record

K3_SHAPES = {"gate": (3072, 3584), "up": (3072, 3584), "down": (3584, 3072)}
LAYOUT = RecordLayout(VQ3R, {"gate": (70, 16), "up": (70, 16), "down": (16, 24)})
WHO = {"layer": 3, "expert": 5, "codebook_base": 27}


def packed() -> bytearray:
    return random_record(np.random.default_rng(0), LAYOUT, 3, 5, 27).pack(LAYOUT)


def test_k3_record_and_banks_have_the_published_size():
    layout = RecordLayout(VQ3R, K3_SHAPES)
    assert layout.stride_bytes == 12_406_784 == 3_029 * 4096
    n_records = 92 * 896
    assert n_records == 82_432
    assert round(n_records * layout.stride_bytes / 2**30, 1) == 952.5


@given(strategies.record_layouts(), strategies.u16, strategies.u16, strategies.u16, st.integers(0, 2**32 - 1))
def test_expert_records_come_back(layout, layer, expert, base, seed):
    record = random_record(np.random.default_rng(seed), layout, layer, expert, base)
    data = bytes(record.pack(layout))
    assert len(data) == layout.stride_bytes
    assert len(data) % 4096 == 0
    again = ExpertRecord.unpack(data, layout, layer=layer, expert=expert, codebook_base=base, check_crc=True)
    for kind in KINDS:
        np.testing.assert_array_equal(again.indices[kind], record.indices[kind])
        np.testing.assert_array_equal(again.scales[kind], record.scales[kind])
    end = layout.scales_offset + layout.scales_bytes
    assert not any(data[end:])


def test_unpacking_copies_nothing():
    data = np.frombuffer(bytes(packed()), dtype=np.uint8)
    record = ExpertRecord.unpack(data.data, LAYOUT, **WHO)
    assert all(np.shares_memory(part, data) for part in (*record.indices.values(), *record.scales.values()))


# field number in the header → a wrong value and a word of the message
WRONG_FIELDS = {
    "magic": (0, 0x4B424357, "magic"),
    "layer": (1, 4, "layer is 0x4, expected 0x3"),
    "expert": (2, 4, "expert is 0x4, expected 0x5"),
    "another format": (3, 5, "format"),
    "unknown format": (3, 7, "format"),
    "flags": (4, 1, "flags"),
    "codebook base": (5, 0, "codebook base"),
    "lowrank id": (6, 1, "lowrank id"),
    "length 0": (8, 0, "record length"),
    "length too large": (8, 0xFFFFFFFF, "record length"),
    "gate in the header": (9, 0, "gate offset"),
    "gate late": (9, 64, "gate offset"),
    "up inside gate": (10, 49, "gate at 48"),
    "up before gate": (10, 0, "gate at 48"),
    "down before up": (11, 48, "up at"),
    "scales before down": (12, 48, "down at"),
    "scales beyond the end": (12, 4096 * 4, "down|scales"),
    "scales partly beyond the end": (12, -2, "scales at"),
    "offset near 2^32": (12, 0xFFFFFFFF, "scales at"),
}


@pytest.mark.parametrize("check_crc", [False, True])
@pytest.mark.parametrize("wrong", WRONG_FIELDS)
def test_every_header_field_is_checked(wrong, check_crc):
    number, value, message = WRONG_FIELDS[wrong]
    data = packed()
    if value < 0:
        value += LAYOUT.stride_bytes
    fields = list(EXPERT_HEADER.unpack_from(data))
    fields[number] = value
    EXPERT_HEADER.pack_into(data, 0, *fields)
    with pytest.raises(FormatError, match=message) as caught:
        ExpertRecord.unpack(data, LAYOUT, **WHO, check_crc=check_crc, source="bank.bin")
    assert str(caught.value).startswith("bank.bin: layer 3 expert 5: ")


def test_gaps_between_the_parts_are_allowed():
    """v0 asks for ordered offsets, not for adjacent ones: another writer may align the parts."""
    layout = RecordLayout(VQ3R, {"gate": (64, 8), "up": (64, 8), "down": (64, 8)})
    record = random_record(np.random.default_rng(4), layout, 1, 0, 0)
    data = bytearray(record.pack(layout))
    moved = layout.scales_offset + 64
    data[moved : moved + layout.scales_bytes] = data[layout.scales_offset : layout.scales_offset + layout.scales_bytes]
    struct.pack_into("<I", data, 32, moved)
    again = ExpertRecord.unpack(data, layout, layer=1, expert=0, codebook_base=0)
    np.testing.assert_array_equal(again.scales["down"], record.scales["down"])


@given(st.integers(0, LAYOUT.stride_bytes - 1))
def test_short_records_are_refused(n_bytes):
    with pytest.raises(FormatError, match="bytes"):
        ExpertRecord.unpack(packed()[:n_bytes], LAYOUT, **WHO)


@given(st.integers(48, LAYOUT.scales_offset + LAYOUT.scales_bytes - 1), st.integers(1, 255))
def test_any_change_of_the_payload_breaks_the_crc32(position, change):
    data = packed()
    data[position] ^= change
    ExpertRecord.unpack(data, LAYOUT, **WHO)
    with pytest.raises(IntegrityError, match=r"layer 3 expert 5: crc32 is 0x[0-9a-f]{8}, the header says"):
        ExpertRecord.unpack(data, LAYOUT, **WHO, check_crc=True)


@given(st.data())
def test_a_damaged_record_is_refused_or_whole(data):
    good = bytes(packed())
    bad = data.draw(strategies.damaged(good))
    assume(bad != good)
    wanted = ExpertRecord.unpack(good, LAYOUT, **WHO)
    try:
        found = ExpertRecord.unpack(bad, LAYOUT, **WHO, check_crc=True)
    except FormatError:
        return
    for kind in KINDS:  # the damage was in the padding or in reserved fields
        np.testing.assert_array_equal(found.indices[kind], wanted.indices[kind])
        np.testing.assert_array_equal(found.scales[kind], wanted.scales[kind])


def test_packing_refuses_parts_of_another_size():
    record = random_record(np.random.default_rng(0), LAYOUT, 3, 5, 27)
    other = RecordLayout(VQ3R, {**LAYOUT.shapes, "up": (128 + 1, 16)})
    with pytest.raises(FormatError, match="layer 3 expert 5 up"):
        record.pack(other)
    one_row_more = RecordLayout(VQ3R, {**LAYOUT.shapes, "down": (17, 24)})  # the same index bytes
    with pytest.raises(FormatError, match="one scale per row"):
        record.pack(one_row_more)


codebook_entries = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).standard_normal((64, 8)).astype(np.float16)
)


@given(strategies.u16, codebook_entries)
def test_codebooks_come_back(codebook_id, entries):
    data = CodebookRecord(codebook_id, entries).pack()
    assert len(data) == CodebookRecord.size(64) == 16 + 64 * 8 * 2
    again = CodebookRecord.unpack(data, codebook_id=codebook_id, n_entries=64, source="codebooks.bin")
    np.testing.assert_array_equal(again.entries, entries)


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"WEXP", "magic"),
        (4, b"\x02\0", "id is 0x2, expected 0x1"),
        (6, b"\x05", "format"),
        (7, b"\x04", "vec_dim"),
        (8, b"\x41\0\0\0", "entries"),
        (8, b"\xff\xff\xff\xff", "entries"),
        (16, b"\x00\x7e", "NaN"),
        (16 + 64 * 16 - 2, b"\x00\xfc", "infinite"),
    ],
)
def test_every_codebook_field_is_checked(offset, new, message):
    data = bytearray(CodebookRecord(1, np.zeros((64, 8), dtype=np.float16)).pack())
    data[offset : offset + len(new)] = new
    with pytest.raises(FormatError, match=message) as caught:
        CodebookRecord.unpack(bytes(data), codebook_id=1, n_entries=64, source="codebooks.bin")
    assert str(caught.value).startswith("codebooks.bin: codebook 1: ")


@pytest.mark.parametrize("n_bytes", [0, 15, 16, 16 + 64 * 16 - 1, 16 + 64 * 16 + 1])
def test_codebooks_of_another_size_are_refused(n_bytes):
    data = CodebookRecord(1, np.zeros((64, 8), dtype=np.float16)).pack() + b"\0"
    with pytest.raises(FormatError, match="1040 bytes expected"):
        CodebookRecord.unpack(data[:n_bytes], codebook_id=1, n_entries=64, source="codebooks.bin")


@pytest.mark.parametrize("entries", [np.full((4, 8), np.inf), np.full((4, 8), np.nan), np.zeros((4, 4)), np.zeros(8)])
def test_codebooks_nobody_could_read_are_not_written(entries):
    with pytest.raises(FormatError, match="codebook 1"):
        CodebookRecord(1, entries.astype(np.float16)).pack()

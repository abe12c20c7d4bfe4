"""Bytes written by hand from docs/FORMAT.md. A change here is a change of the format, which other programs read."""

from __future__ import annotations

import numpy as np
import pytest

from container.indices import pack_indices, unpack_indices
from container.layout import VQ2R, VQ3R, VQ4P, ExpertQuant, TrunkFormat
from container.manifest import BankEntry, FileEntry, Manifest, TrunkEntry
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import pack_rows, unpack_rows


def crc32_bit_by_bit(data: bytes) -> int:
    """CRC-32 of IEEE 802.3 from its definition, for want of a table or zlib."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_the_oracle_knows_the_check_value_of_crc32():
    assert crc32_bit_by_bit(b"123456789") == 0xCBF43926


EXPERT_HEADER_HEX = """
    57455850                    magic "WEXP"
    0300 0500                   layer 3, expert 5
    04 00                       VQ3R, flags
    1b00 0000 0000              codebook base 27, lowrank id, reserved
    01000000                    one page of 4096
    30000000 f0000000 b0010000  gate at 48, up at 240, down at 432
    70020000                    scales at 624
    c778ac83 00000000 00000000  crc32 of the payload, reserved
"""


def from_hex(text: str) -> bytes:
    """Bytes of the hex digits before two spaces and a remark on each line."""
    return bytes.fromhex("".join(f"{line.strip()}  ".split("   ")[0].split("  ")[0] for line in text.splitlines()))


def tiny_expert() -> tuple[ExpertRecord, RecordLayout, bytes]:
    """Three 2 × 8 matrices; the payload is written out: 64 rows of 3 bytes each, then six scales."""
    layout = RecordLayout(VQ3R, {"gate": (2, 8), "up": (2, 8), "down": (2, 8)})
    codes = {
        "gate": [[[1, 2, 3]], [[4, 5, 6]]],
        "up": [[[255, 0, 128]], [[7, 7, 7]]],
        "down": [[[9, 8, 7]], [[0, 0, 1]]],
    }
    indices = {kind: pack_indices(np.array(rows, dtype=np.uint8), VQ3R) for kind, rows in codes.items()}
    scales = {"gate": [1.0, -2.0], "up": [0.5, 0.25], "down": [65504.0, 0.0]}
    record = ExpertRecord(3, 5, 27, indices, {kind: np.array(s, dtype=np.float16) for kind, s in scales.items()})
    payload = b"".join(
        [
            bytes.fromhex("010203 040506") + bytes(62 * 3),
            bytes.fromhex("ff0080 070707") + bytes(62 * 3),
            bytes.fromhex("090807 000001") + bytes(62 * 3),
            bytes.fromhex("003c 00c0  0038 0034  ff7b 0000"),
        ]
    )
    return record, layout, payload


def test_expert_record():
    record, layout, payload = tiny_expert()
    header = from_hex(EXPERT_HEADER_HEX)
    assert len(header) == 48
    assert int.from_bytes(header[36:40], "little") == crc32_bit_by_bit(payload)
    expected = (header + payload).ljust(4096, b"\0")
    assert bytes(record.pack(layout)) == expected
    again = ExpertRecord.unpack(expected, layout, layer=3, expert=5, codebook_base=27, check_crc=True)
    assert again.indices["up"][:3].tolist() == [255, 0, 128]
    assert again.scales["down"].tolist() == [65504.0, 0.0]


CODEBOOK_HEX = """
    5743424b           magic "WCBK"
    0700 04 08         id 7, fmt, vec_dim
    02000000 00000000  two entries, reserved
    003c 00c0 0038 0034 ff7b 0100 0000 0080  1, -2, 1/2, 1/4, 65504, 2**-24, 0, -0
    0040 0040 0040 0040 0040 0040 0040 0040  eight times 2
"""


def test_codebook_record():
    entries = np.array([[1, -2, 0.5, 0.25, 65504, 2.0**-24, 0.0, -0.0], [2.0] * 8], dtype=np.float16)
    record = CodebookRecord(7, entries)
    assert record.pack() == from_hex(CODEBOOK_HEX)
    again = CodebookRecord.unpack(from_hex(CODEBOOK_HEX), codebook_id=7, n_entries=2, source="here")
    np.testing.assert_array_equal(again.entries.view(np.uint16), entries.view(np.uint16))


# Two rows, two vectors: the tile holds vector 0 of all 64 rows, then vector 1 of all 64 rows.
TILES: list[tuple[ExpertQuant, list[list[list[int]]], list[str]]] = [
    (VQ3R, [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]], ["010203 070809", "040506 0a0b0c"]),
    (VQ2R, [[[1, 2], [4, 5]], [[7, 8], [255, 11]]], ["0102 0708", "0405 ff0b"]),
    (
        VQ4P,  # 24 bits, stage 0 lowest: 1 + 2·2^6 + 3·2^12 + 4·2^18 = 0x103081
        [[[1, 2, 3, 4], [63, 0, 63, 0]], [[0, 63, 0, 63], [63, 63, 63, 63]]],
        ["813010 c00ffc", "3ff003 ffffff"],
    ),
]


@pytest.mark.parametrize(("quant", "codes", "rows"), TILES, ids=["VQ3R", "VQ2R", "VQ4P"])
def test_index_tile(quant, codes, rows):
    expected = b"".join(bytes.fromhex(row).ljust(64 * quant.vector_bytes, b"\0") for row in rows)
    array = np.array(codes, dtype=np.uint8)
    assert pack_indices(array, quant).tobytes() == expected
    found = unpack_indices(np.frombuffer(expected, dtype=np.uint8), (2, 16), quant)
    np.testing.assert_array_equal(found, array)


def test_index_tiles_follow_each_other():
    codes = np.zeros((65, 1, 2), dtype=np.uint8)
    codes[64] = [0xAB, 0xCD]  # first row of the second tile
    assert pack_indices(codes, VQ2R).tobytes() == bytes(64 * 2) + b"\xab\xcd" + bytes(63 * 2)


def ragged_row(first: list[float], second: list[float]) -> np.ndarray:
    """130 weights: one whole group of 128 and two more."""
    row = np.zeros((1, 130), dtype=np.float32)
    row[0, : len(first)] = first
    row[0, 128 : 128 + len(second)] = second
    return row


def test_q8g_row():
    row = ragged_row([127, -127, 1, -1.4], [0.5, -0.25])
    values, scales = pack_rows(row, TrunkFormat.Q8G)
    # second scale: 0.5 / 127 is 1.0079 · 2^-8, in f16 (1 + 8/1024) · 2^-8; -0.25 is -63.5 of it
    assert values.tobytes() == bytes.fromhex("7f8101ff").ljust(128, b"\0") + bytes.fromhex("7fc0").ljust(128, b"\0")
    assert scales.tobytes() == bytes.fromhex("003c 081c")
    again = unpack_rows(values, scales, 130, TrunkFormat.Q8G)
    assert again.shape == (1, 130)
    assert again[0, [0, 1, 2, 3, 4]].tolist() == [127, -127, 1, -1, 0]


def test_q4g_row():
    row = ragged_row([7, -7, 1, -3], [14, -2])
    values, scales = pack_rows(row, TrunkFormat.Q4G)
    # stored + 8, low nibble first; zero is 8
    assert values.tobytes() == bytes.fromhex("1f59") + b"\x88" * 62 + bytes.fromhex("7f") + b"\x88" * 63
    assert scales.tobytes() == bytes.fromhex("003c 0040")
    np.testing.assert_array_equal(unpack_rows(values, scales, 130, TrunkFormat.Q4G), row)


def test_q4g_reads_its_lowest_value():
    values = np.full((1, 64), 0x80, dtype=np.uint8)  # -8, 0
    weights = unpack_rows(values, np.array([[0.5]], dtype=np.float16), 4, TrunkFormat.Q4G)
    assert weights.tolist() == [[-4, 0, -4, 0]]


def test_f32_row():
    values, scales = pack_rows(np.array([[1.0, -2.5]], dtype=np.float32), TrunkFormat.F32)
    assert values.tobytes() == bytes.fromhex("0000803f 000020c0")
    assert scales.shape == (1, 0)


MANIFEST_TEXT = """\
{
 "format_version": 0,
 "arch": "kimi-k3",
 "tensor_prefix": "language_model.",
 "config": {
  "hidden_size": 64
 },
 "expert_quant": {
  "fmt": "VQ3R",
  "stages": 3,
  "vec_dim": 8,
  "entries": 256,
  "index_block": 64,
  "index_bits": 8,
  "bits_per_weight": 3.0
 },
 "layers": {
  "1": {
   "file": "experts-L1.bin",
   "experts": 2,
   "bytes": 8192,
   "codebook_base": 0
  },
  "10": {
   "file": "experts-L10.bin",
   "experts": 2,
   "bytes": 8192,
   "codebook_base": 9
  }
 },
 "trunk": [
  {
   "name": "a",
   "fmt": 0,
   "off": 0,
   "shape": [
    3
   ],
   "bytes": 12
  },
  {
   "name": "b",
   "fmt": 2,
   "off": 64,
   "shape": [
    2,
    130
   ],
   "bytes": 520,
   "group": 128,
   "scale_off": 576,
   "crc32": 4294967295
  }
 ],
 "files": {
  "trunk.bin": {
   "bytes": 584,
   "sha256": "%s"
  }
 },
 "provenance": {
  "seed": 1
 }
}
""" % ("0a" * 32)  # fmt: skip


def test_manifest():
    bank = {"n_experts": 2, "n_bytes": 8192}
    manifest = Manifest(
        arch="kimi-k3",
        tensor_prefix="language_model.",
        config={"hidden_size": 64},
        expert_quant=VQ3R,
        layers={
            10: BankEntry(file="experts-L10.bin", codebook_base=9, **bank),
            1: BankEntry(file="experts-L1.bin", codebook_base=0, **bank),
        },
        trunk=(
            TrunkEntry(name="a", fmt=TrunkFormat.F32, shape=(3,), offset=0, n_bytes=12),
            TrunkEntry(
                name="b",
                fmt=TrunkFormat.Q8G,
                shape=(2, 130),
                offset=64,
                n_bytes=520,
                scale_offset=576,
                crc32=0xFFFFFFFF,
            ),
        ),
        files={"trunk.bin": FileEntry(n_bytes=584, sha256="0a" * 32)},
        provenance={"seed": 1},
    )
    assert manifest.to_bytes().decode() == MANIFEST_TEXT

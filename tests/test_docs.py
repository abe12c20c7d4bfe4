"""docs/FORMAT.md against the code: each table is parsed and compared with definitions or with bytes."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from container import layout
from container.errors import FormatError
from container.indices import pack_indices
from container.layout import (
    CODEBOOK_HEADER,
    EXPERT_HEADER,
    EXPERT_QUANTS,
    USAGE_ENTRY,
    USAGE_HEADER,
    TrunkFormat,
    bank_name,
)
from container.records import CodebookRecord, ExpertRecord, RecordLayout
from container.trunk import trunk_size
from tests.container.small import small_files
from tests.containers import random_record

Row = dict[str, str]
TEXT = (Path(__file__).parents[1] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
TYPES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}


def sections(text: str) -> dict[str, str]:
    """Heading → the text below it, up to the next heading."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(heading: str) -> list[list[Row]]:
    """The tables below a heading, each as rows of column → cell."""
    found: list[list[Row]] = []
    columns: list[str] = []
    for line in sections(TEXT)[heading].splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not columns:
            columns = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


def table(heading: str, number: int = 0) -> list[Row]:
    rows = tables(heading)[number]
    assert rows
    return rows


def code(cell: str) -> str:
    """The words of a cell that stand in backquotes."""
    return " ".join(re.findall(r"`([^`]*)`", cell))


def struct_fields(definition: struct.Struct) -> list[tuple[int, int, str]]:
    """(offset, size, type) of each field of a struct."""
    assert definition.format[0] == "<"
    names = {letter: name for name, letter in TYPES.items()}
    fields, offset = [], 0
    for letter in definition.format[1:]:
        size = struct.calcsize(f"<{letter}")
        fields.append((offset, size, names[letter]))
        offset += size
    assert offset == definition.size
    return fields


@pytest.mark.parametrize(
    ("heading", "definition"),
    [("Expert record", EXPERT_HEADER), ("Codebook record", CODEBOOK_HEADER), ("usage.waste", USAGE_HEADER)],
)
def test_header_tables_are_the_structs(heading, definition):
    documented = [(int(row["offset"]), int(row["size"]), row["type"]) for row in table(heading)]
    assert documented == struct_fields(definition)
    header_bytes = re.search(r"header of (\d+) bytes", sections(TEXT)[heading])
    assert header_bytes
    assert int(header_bytes[1]) == definition.size


def test_usage_entries_are_the_struct():
    documented = [(int(row["offset"]), int(row["size"]), row["type"]) for row in table("usage.waste", 1)]
    assert documented == struct_fields(USAGE_ENTRY)
    assert f"entries of {USAGE_ENTRY.size} bytes" in sections(TEXT)["usage.waste"]


def documented_fields(heading: str, record: bytes) -> dict[str, int]:
    """What stands in `record` where the table says each field lies."""
    return {
        row["field"]: struct.unpack_from(f"<{TYPES[row['type']]}", record, int(row["offset"]))[0]
        for row in table(heading)
        if row["field"] != "reserved"
    }


def test_expert_fields_lie_where_the_table_says():
    shapes = {"gate": (70, 16), "up": (80, 24), "down": (16, 32)}
    record_layout = RecordLayout(layout.VQ2R, shapes)
    record = bytes(random_record(np.random.default_rng(0), record_layout, 11, 22, 33).pack(record_layout))
    found = documented_fields("Expert record", record)
    gate_end, up_bytes = 48 + 128 * 2 * 2, 128 * 3 * 2
    crc32 = found.pop("crc32")
    assert found == {
        "magic": layout.EXPERT_MAGIC,
        "layer": 11,
        "expert": 22,
        "fmt": 5,
        "flags": 0,
        "codebook base": 33,
        "lowrank id": 0,
        "pages": len(record) // 4096,
        "gate offset": 48,
        "up offset": gate_end,
        "down offset": gate_end + up_bytes,
        "scales offset": gate_end + up_bytes + 64 * 4 * 2,
    }
    assert crc32 == zlib.crc32(record[48 : record_layout.scales_offset + 2 * (70 + 80 + 16)])


def test_payload_parts_follow_the_table():
    parts = [row["part"] for row in table("Expert record", 1)]
    record_layout = RecordLayout(layout.VQ3R, dict.fromkeys(("gate", "up", "down"), (8, 8)))
    assert parts == [*sorted(record_layout.index_offsets, key=record_layout.index_offsets.__getitem__), "scales"]


def test_must_rules_of_the_expert_header_are_enforced():
    """Where the table says MUST, another value is refused; where it says ignored, it is not."""
    record_layout = RecordLayout(layout.VQ3R, dict.fromkeys(("gate", "up", "down"), (8, 8)))
    good = random_record(np.random.default_rng(0), record_layout, 1, 2, 9).pack(record_layout)
    for row in table("Expert record"):
        bad = bytearray(good)
        letter, offset = TYPES[row["type"]], int(row["offset"])
        (value,) = struct.unpack_from(f"<{letter}", bad, offset)
        struct.pack_into(f"<{letter}", bad, offset, value - 1 if "not lie before" in row["rule"] else value + 1)
        refused = check_refused(bad, record_layout)
        assert refused == ("MUST" in row["rule"] or "refuse" in row["rule"] or row["field"] == "crc32"), row


def check_refused(record: bytearray, record_layout: RecordLayout) -> bool:
    try:
        ExpertRecord.unpack(record, record_layout, layer=1, expert=2, codebook_base=9, check_crc=True)
    except FormatError:
        return True
    return False


def test_codebook_fields_lie_where_the_table_says():
    record = CodebookRecord(7, np.zeros((3, 8), dtype=np.float16)).pack()
    assert documented_fields("Codebook record", record) == {
        "magic": layout.CODEBOOK_MAGIC, "id": 7, "fmt": layout.CODEBOOK_FMT, "vec_dim": 8, "entries": 3,
    }  # fmt: skip
    assert len(record) == 16 + 16 * 3
    assert "id · (16 + 16 · entries)" in sections(TEXT)["Codebook record"]


def test_constants():
    for row in table("Constants"):
        assert getattr(layout, code(row["constant"])) == int(row["value"], 0), row
        magic = re.fullmatch('"(W...)"', row["meaning"])
        if magic:
            assert int(row["value"], 0).to_bytes(4, "little") == magic[1].encode()
    documented = {code(row["constant"]) for row in table("Constants")}
    defined = {name for name, value in vars(layout).items() if name.isupper() and type(value) is int}
    assert documented == defined - {"MAX_U16"}


def test_file_names():
    documented = {code(row["file"]) for row in table("Files")}
    assert {layout.MANIFEST_NAME, layout.TRUNK_NAME, layout.CODEBOOKS_NAME} <= documented
    assert bank_name(12).replace("12", "{layer}") in documented


def test_expert_formats():
    rows = table("Expert formats")
    assert [int(row["fmt"]) for row in rows] == [int(fmt) for fmt in EXPERT_QUANTS]
    for row, quant in zip(rows, EXPERT_QUANTS.values(), strict=True):
        assert row == {
            "fmt": str(int(quant.fmt)),
            "name": quant.fmt.name,
            "stages": str(quant.n_stages),
            "entries": str(quant.n_entries),
            "index bits": str(quant.index_bits),
            "bytes per vector": str(quant.vector_bytes),
            "bits per weight": str(quant.bits_per_weight),
        }


def test_bits_of_each_stage():
    rows = {row["fmt"]: row for row in table("Expert formats", 1)}
    assert set(rows) == {quant.fmt.name for quant in EXPERT_QUANTS.values()}
    for quant in EXPERT_QUANTS.values():
        documented = [cell for column, cell in rows[quant.fmt.name].items() if column.startswith("stage") and cell]
        assert len(documented) == quant.n_stages
        for stage, cell in enumerate(documented):
            first, last = (int(number) for number in cell.split("–"))
            codes = np.zeros((1, 1, quant.n_stages), dtype=np.uint8)
            codes[0, 0, stage] = quant.n_entries - 1
            number = int.from_bytes(pack_indices(codes, quant)[: quant.vector_bytes].tobytes(), "little")
            assert number == sum(1 << bit for bit in range(first, last + 1))


def test_trunk_formats():
    rows = table("trunk.bin")
    assert [(int(row["fmt"]), row["name"]) for row in rows] == [(int(fmt), fmt.name) for fmt in TrunkFormat]
    for row in rows:
        for cols in (1, 128, 129, 7168):
            size = trunk_size((5, cols), TrunkFormat[row["name"]])
            assert size.row_bytes == evaluate(row["values per row of C weights"], cols)
            assert size.row_scale_bytes == evaluate(row["group scales per row"], cols)


def evaluate(cell: str, cols: int) -> int:
    """`2 · ⌈C/128⌉` and the like for a number of columns."""
    result = 1
    for factor in cell.split(" · "):
        result *= {"C": cols, "⌈C/128⌉": -(-cols // 128)}.get(factor) or int(factor)
    return result


MANIFEST = small_files()[0].to_json()


@pytest.mark.parametrize(
    ("heading", "found"),
    [
        ("Manifest keys", list(MANIFEST)),
        ("expert_quant keys", list(MANIFEST["expert_quant"])),
        ("layers keys", list(MANIFEST["layers"]["1"])),
        ("trunk keys", list(MANIFEST["trunk"][1])),
        ("files keys", list(MANIFEST["files"]["trunk.bin"])),
    ],
)
def test_manifest_keys_and_their_order(heading, found):
    assert [code(row["key"]) for row in table(heading)] == found


def test_types_of_the_manifest_keys():
    kinds = {"integer": int, "string": str, "object": dict, "array": list, "number": float}
    for heading, holder in (
        ("Manifest keys", MANIFEST),
        ("expert_quant keys", MANIFEST["expert_quant"]),
        ("layers keys", MANIFEST["layers"]["1"]),
        ("trunk keys", MANIFEST["trunk"][1]),
        ("files keys", MANIFEST["files"]["trunk.bin"]),
    ):
        for row in table(heading):
            assert type(holder[code(row["key"])]) is kinds[row["type"]], row


def test_grouped_keys_are_marked():
    marked = {code(row["key"]) for row in table("trunk keys") if "grouped formats only" in row["rule"]}
    assert marked == set(MANIFEST["trunk"][1]) - set(MANIFEST["trunk"][0])


def test_size_of_k3():
    numbers = {row["what"]: row["number"].replace(",", "") for row in table("Size of Kimi K3")}
    rows, cols = (int(n) for n in numbers["gate and up, rows × columns"].split(" × "))
    assert numbers["down, rows × columns"] == f"{cols} × {rows}"
    record_layout = RecordLayout(layout.VQ3R, {"gate": (rows, cols), "up": (rows, cols), "down": (cols, rows)})
    n_records = int(numbers["MoE layers"]) * int(numbers["experts per layer"])
    assert int(numbers["bytes of a VQ3R record"]) == record_layout.stride_bytes
    assert int(numbers["records"]) == n_records
    assert float(numbers["GiB of all records"]) == round(n_records * record_layout.stride_bytes / 2**30, 1)
    assert int(numbers["bytes of a layer's codebooks"]) == 9 * CodebookRecord.size(256)


def test_every_must_has_a_reason_or_a_table():
    """A rule in prose says why; rules in tables are explained below them."""
    for heading, text in sections(TEXT).items():
        prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        for paragraph in re.split(r"\n\n|\n\* ", prose):
            if "MUST" in paragraph and "MUST marks" not in paragraph:
                assert "Why:" in paragraph, f"{heading}: {paragraph}"

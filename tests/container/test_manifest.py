from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container import manifest as manifest_module
from container.errors import FormatError
from container.layout import VQ2R, VQ3R, VQ4P
from container.manifest import Manifest
from tests import strategies
from tests.container.small import small_files

MANIFEST, _ = small_files()
GOOD = MANIFEST.to_json()
OPTIONAL = {"files", "provenance", "crc32", "bits_per_weight"}


@given(strategies.manifests())
def test_manifests_come_back(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest
    data = manifest.to_bytes()
    assert data.endswith(b"}\n")
    assert Manifest.from_json(json.loads(data)).to_bytes() == data


@given(strategies.manifests())
def test_unknown_keys_are_ignored(manifest):
    raw = manifest.to_json() | {"extra": {"x": [1]}}
    for entry in (*raw["layers"].values(), *raw["trunk"], *raw["files"].values(), raw["expert_quant"]):
        entry["extra"] = None
    assert Manifest.from_json(raw) == manifest


@pytest.mark.parametrize(
    ("quant", "expected"),
    [(VQ3R, ("VQ3R", 3, 256, 8, 3.0)), (VQ2R, ("VQ2R", 2, 256, 8, 2.0)), (VQ4P, ("VQ4P", 4, 64, 6, 3.0))],
)
def test_expert_formats(quant, expected):
    manifest, _ = small_files(quant)
    found = manifest.to_json()["expert_quant"]
    assert (found["fmt"], found["stages"], found["entries"], found["index_bits"], found["bits_per_weight"]) == expected
    assert Manifest.from_json(manifest.to_json()).expert_quant is quant


def places() -> list[tuple[str, ...]]:
    """Path of every key that the format knows; one trunk entry per format."""
    paths: list[tuple[Any, ...]] = [(key,) for key in GOOD]
    paths += [("expert_quant", key) for key in GOOD["expert_quant"]]
    paths += [("layers", "1", key) for key in GOOD["layers"]["1"]]
    paths += [("trunk", n, key) for n, entry in enumerate(GOOD["trunk"]) for key in entry]
    paths += [("files", "trunk.bin", key) for key in GOOD["files"]["trunk.bin"]]
    return paths


def changed(path: tuple[Any, ...], value: Any = None, *, delete: bool = False) -> dict[str, Any]:
    raw = copy.deepcopy(GOOD)
    holder: Any = raw
    for key in path[:-1]:
        holder = holder[key]
    if delete:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return raw


def refused(raw: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        Manifest.from_json(raw, "folder/manifest.json")
    assert str(caught.value).startswith("folder/manifest.json: ")


def name_of(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)


@pytest.mark.parametrize("path", places(), ids=name_of)
def test_every_key_is_needed_unless_it_is_ours(path):
    raw = changed(path, delete=True)
    if path[-1] in OPTIONAL:
        Manifest.from_json(raw)
    else:
        refused(raw, f"`{path[-1]}` is missing")


WRONG_TYPES = [
    (path, value)
    for path in places()
    for value in (None, True, 1.0, -1, "x\0", [[]], 1 << 63)
    if path[-1] != "bits_per_weight"  # said for people, read by nobody
    and not (isinstance(value, str) and path[-1] in ("arch", "tensor_prefix", "name"))
]


@pytest.mark.parametrize(("path", "value"), WRONG_TYPES, ids=str)
def test_every_key_has_one_type(path, value):
    refused(changed(path, value), str(path[-1]))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "version 1": (changed(("format_version",), 1), "format_version is 1; this program reads version 0"),
    "version true": (changed(("format_version",), True), "format_version is True"),
    "version false": (changed(("format_version",), False), "format_version is False"),
    "version 0.0": (changed(("format_version",), 0.0), "format_version is 0.0"),
    "version as text": (changed(("format_version",), "0"), "format_version is '0'"),
    "unknown expert format": (changed(("expert_quant", "fmt"), "VQ9"), "'VQ9' is not one we read .VQ3R = 4, VQ2R = 5"),
    "stages": (changed(("expert_quant", "stages"), 2), "VQ3R has `stages` 3, found 2"),
    "vec_dim": (changed(("expert_quant", "vec_dim"), 16), "`vec_dim` 8, found 16"),
    "entries": (changed(("expert_quant", "entries"), 64), "`entries` 256, found 64"),
    "index_block": (changed(("expert_quant", "index_block"), 32), "`index_block` 64, found 32"),
    "index_bits": (changed(("expert_quant", "index_bits"), 6), "`index_bits` 8, found 6"),
    "layer is no number": (changed(("layers", "one"), GOOD["layers"]["1"]), "layer 'one'"),
    "layer with a zero first": (changed(("layers", "01"), GOOD["layers"]["1"]), "layer '01'"),
    "layer negative": (changed(("layers", "-1"), GOOD["layers"]["1"]), "layer '-1'"),
    "layer in other digits": (changed(("layers", "\u0661"), GOOD["layers"]["1"]), "layer"),
    "layer beyond u16": (changed(("layers", "65536"), GOOD["layers"]["1"]), "layer '65536'"),
    "bytes not divisible": (changed(("layers", "1", "bytes"), 8193), "8193 bytes are no whole number for 2 experts"),
    "no experts": (changed(("layers", "1", "experts"), 0), "`experts` must be a whole number from 1"),
    "no bytes": (changed(("layers", "1", "bytes"), 0), "`bytes` must be a whole number from 1"),
    "codebook base beyond u16": (changed(("layers", "1", "codebook_base"), 65536), "`codebook_base`"),
    "bank with a slash": (changed(("layers", "1", "file"), "a/b.bin"), "plain file name, found 'a/b.bin'"),
    "bank with a backslash": (changed(("layers", "1", "file"), "a\\b.bin"), "plain file name"),
    "bank outside": (changed(("layers", "1", "file"), "../b.bin"), "plain file name"),
    "bank is the parent": (changed(("layers", "1", "file"), ".."), "plain file name"),
    "bank is the folder": (changed(("layers", "1", "file"), "."), "plain file name"),
    "bank absolute": (changed(("layers", "1", "file"), "/etc/passwd"), "plain file name"),
    "bank without a name": (changed(("layers", "1", "file"), ""), "plain file name"),
    "bank with NUL": (changed(("layers", "1", "file"), "a\0"), "plain file name"),
    "bank is the trunk": (changed(("layers", "1", "file"), "trunk.bin"), "trunk.bin is used twice"),
    "one bank for two layers": (changed(("layers", "2"), GOOD["layers"]["1"]), "experts-L1.bin is used twice"),
    "trunk no list": (changed(("trunk",), {}), "`trunk` must be a list"),
    "trunk tensor twice": (changed(("trunk",), [*GOOD["trunk"], GOOD["trunk"][1]]), "weight is listed twice"),
    "trunk format 1": (changed(("trunk", 0, "fmt"), 1), "fmt 1 is not one we read .F32 = 0, Q8G = 2, Q4G = 3"),
    "trunk format Q3G": (changed(("trunk", 1, "fmt"), 7), "fmt 7 is not one we read"),
    "no dimension": (changed(("trunk", 0, "shape"), []), "1 to 4 positive"),
    "five dimensions": (changed(("trunk", 0, "shape"), [1, 1, 1, 1, 16]), "1 to 4 positive"),
    "dimension 0": (changed(("trunk", 0, "shape"), [16, 0]), "1 to 4 positive"),
    "dimension as bool": (changed(("trunk", 0, "shape"), [True, 16]), "1 to 4 positive"),
    "huge shape": (changed(("trunk", 0, "shape"), [1 << 62] * 4), "do not fit bytes 64"),
    "group": (changed(("trunk", 1, "group"), 64), "group must be 128, found 64"),
    "F32 bytes": (changed(("trunk", 0, "bytes"), 63), "takes 64 bytes, which do not fit bytes 63"),
    "scales inside the values": (changed(("trunk", 1, "scale_off"), 64), "scale_off 64"),
    "scales beyond the end": (changed(("trunk", 1, "bytes"), 1039), "takes 1040 bytes, which do not fit bytes 1039"),
    "crc32 beyond u32": (changed(("trunk", 1, "crc32"), 1 << 32), "`crc32`"),
    "files outside": (changed(("files", "../x"), GOOD["files"]["trunk.bin"]), "`files` must name plain file names"),
    "sha256 too short": (changed(("files", "trunk.bin", "sha256"), "00"), "64 lower-case"),
    "sha256 not hexadecimal": (changed(("files", "trunk.bin", "sha256"), "g" * 64), "64 lower-case"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_manifests_are_refused(name):
    refused(*BAD[name])


@pytest.mark.parametrize("raw", [None, [], "x", 0, {}], ids=repr)
def test_what_is_no_manifest_is_refused(raw):
    refused(raw, "must be an object|`format_version` is missing")


def test_slack_between_values_and_scales_is_allowed():
    """v0 gives scales a place of their own, so another writer may align them."""
    raw = copy.deepcopy(GOOD)
    raw["trunk"][1]["scale_off"] += 8
    raw["trunk"][1]["bytes"] += 8
    entry = Manifest.from_json(raw).trunk[1]
    assert entry.scale_offset == entry.offset + entry.size.values_bytes + 8


@given(st.data())
def test_hostile_values_are_refused_or_kept(data):
    """Any other exception than FormatError fails."""
    raw = data.draw(strategies.with_hostile_value(GOOD))
    try:
        manifest = Manifest.from_json(raw)
    except FormatError:
        return
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_reading_says_what_to_do(tmp_path):
    with pytest.raises(FormatError, match=r"no such file; is .* a container, and was its conversion finished\?"):
        Manifest.read(tmp_path)


def test_nothing_large_is_read(tmp_path, monkeypatch):
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_bytes())
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(FormatError, match="more than a manifest can have"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "must hold an object"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"format_version":0,"format_version":1}', "key occurs twice"),
        (b'{"format_version":NaN}', "NaN"),
        (b'{"format_version":0,"arch":"\\ud800"}', "not valid JSON"),
    ],
)
def test_bad_json_is_refused(tmp_path, data, message):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        Manifest.read(tmp_path)


@given(st.data())
def test_damaged_text_is_refused_or_read(tmp_path, data):
    (tmp_path / "manifest.json").write_bytes(data.draw(strategies.damaged(MANIFEST.to_bytes())))
    with contextlib.suppress(FormatError):  # any other exception fails
        Manifest.read(tmp_path)

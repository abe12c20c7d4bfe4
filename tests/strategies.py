"""Hypothesis strategies for the formats: matrices, records, manifests, and damage to files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from container.layout import EXPERT_QUANTS, VEC_DIM, ExpertQuant, TrunkFormat
from container.manifest import BankEntry, FileEntry, Manifest, TrunkEntry
from container.records import RecordLayout
from container.trunk import trunk_size

quants = st.sampled_from(list(EXPERT_QUANTS.values()))
u16 = st.integers(0, 0xFFFF)
tensor_names = st.from_regex(r"[a-z0-9][a-z0-9._]{0,29}", fullmatch=True)
file_names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}(\.bin)?", fullmatch=True)


@st.composite
def codes(draw: st.DrawFn) -> tuple[ExpertQuant, npt.NDArray[np.uint8]]:
    """A format and codes [rows, vectors, stages] that fit it; rows around the tile size of 64."""
    quant = draw(quants)
    rows = draw(st.one_of(st.integers(1, 5), st.integers(60, 68), st.integers(120, 130)))
    shape = (rows, draw(st.integers(1, 4)), quant.n_stages)
    return quant, draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, quant.n_entries - 1)))


def record_layouts() -> st.SearchStrategy[RecordLayout]:
    """Layouts of small experts with shapes of their own for gate, up and down."""
    shape = st.tuples(st.integers(1, 130), st.integers(1, 4).map(lambda n_vectors: n_vectors * VEC_DIM))
    return st.builds(RecordLayout, quants, st.fixed_dictionaries({"gate": shape, "up": shape, "down": shape}))


@st.composite
def weights(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Weights [rows, cols] f32: each row of one magnitude between subnormal and 1e38, zeros mixed in."""
    rows, cols = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 127, 128, 129, 256, 300]))
    unit = draw(hnp.arrays(np.float32, (rows, cols), elements=st.floats(-1, 1, width=32)))
    exponents = draw(hnp.arrays(np.int32, (rows, 1), elements=st.integers(-148, 126)))
    return np.ldexp(unit, exponents)


@st.composite
def trunk_entries(draw: st.DrawFn, name: str) -> TrunkEntry:
    """One well-formed trunk entry."""
    fmt = draw(st.sampled_from(TrunkFormat))
    shape = tuple(draw(st.lists(st.integers(1, 300), min_size=1, max_size=4)))
    size, offset = trunk_size(shape, fmt), draw(st.integers(0, 1 << 40))
    return TrunkEntry(
        name=name,
        fmt=fmt,
        shape=shape,
        offset=offset,
        n_bytes=size.total_bytes,
        scale_offset=None if fmt is TrunkFormat.F32 else offset + size.values_bytes,
        crc32=draw(st.none() | st.integers(0, 0xFFFFFFFF)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any well-formed manifest; its config is free text, which the manifest does not interpret."""
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8"), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tensor_names, inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    objects = st.dictionaries(tensor_names, json_values, max_size=4)
    files = st.builds(
        FileEntry, n_bytes=st.integers(0, 1 << 50), sha256=st.binary(min_size=32, max_size=32).map(bytes.hex)
    )
    layers = {}
    for layer in draw(st.sets(u16, max_size=4)):
        n_experts, stride = draw(st.integers(1, 900)), draw(st.integers(1, 4000)) * 4096
        layers[layer] = BankEntry(
            file=f"experts-L{layer}.bin", n_experts=n_experts, n_bytes=n_experts * stride, codebook_base=draw(u16)
        )
    return Manifest(
        arch=draw(st.text(max_size=10)),
        tensor_prefix=draw(tensor_names),
        config=draw(objects),
        expert_quant=draw(quants),
        layers=layers,
        trunk=tuple(draw(trunk_entries(name)) for name in draw(st.lists(tensor_names, unique=True, max_size=4))),
        files=draw(st.dictionaries(file_names, files, max_size=3)),
        provenance=draw(objects),
    )


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with a few bytes changed, a piece cut out, its end cut off, or bytes added."""
    how = draw(st.sampled_from(["flip", "truncate", "cut", "add"]))
    position = draw(st.integers(0, max(len(data) - 1, 0)))
    if how == "truncate":
        return data[:position]
    if how == "cut":
        return data[:position] + data[position + draw(st.integers(1, 64)) :]
    if how == "add":
        return data[:position] + draw(st.binary(min_size=1, max_size=16)) + data[position:]
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        changed[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return bytes(changed)


HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 0.0, 0.5, 1e308, 2**31, 2**63 - 1, 2**63, 10**30, "", "0", "x", "..", ".", "a/b",
    "../manifest.json", "\0", "é", [], [[]], [0], [-1], [1.5], [True], [2**62] * 8, ["a"], {}, {"a": 1},
)  # fmt: skip


@st.composite
def with_hostile_value(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of a JSON value in which one or two places hold something else, or are gone."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(_places(changed))))
        if isinstance(holder, dict) and draw(st.booleans()):
            value = holder.pop(key)
            if draw(st.booleans()):
                holder[draw(st.sampled_from(["", "..", "00", "65536", "x/y", "name"]))] = value
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
        if not changed:
            break
    return changed


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key or position) below `tree`."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])

"""Experts against their unpacked matrices in float64: ragged shapes, all formats, the same bits on 1 to 3 threads."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.indices import index_bytes, pack_indices
from container.layout import EXPERT_QUANTS, TILE_ROWS, VEC_DIM, ExpertQuant
from container.model import KINDS
from container.records import ExpertRecord
from runtime.compute import expert_kernels, experts, lanes
from runtime.compute.experts import LayerCodebooks
from runtime.compute.gates import Activation
from runtime.compute.team import Team
from tests.runtime.kernel_checks import F32, ONE, close, normal, seeds, teams
from tests.runtime.oracle import dense_expert_matrix, sigmoid, situ
from tests.strategies import quants


@pytest.fixture(autouse=True, scope="module")
def share_everything() -> Iterator[None]:
    """Let the teams share even the smallest tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_LEAST_VECTORS", 1)
        yield


def random_record(rng: np.random.Generator, quant: ExpertQuant, shapes: dict[str, tuple[int, int]]) -> ExpertRecord:
    indices, scales = {}, {}
    for kind, (rows, cols) in shapes.items():
        codes = rng.integers(quant.n_entries, size=(rows, cols // VEC_DIM, quant.n_stages), dtype=np.uint8)
        indices[kind] = pack_indices(codes, quant)
        scales[kind] = np.exp(normal(rng, rows)).astype(np.float16)
    return ExpertRecord(0, 0, 0, indices, scales)


rows_of_tiles = st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(125, 131))


def product(record: ExpertRecord, kind: str, books: npt.NDArray[np.float16], x: F32, *, tiles_at_once: int) -> F32:
    """One of the record's matrices times x, in several calls."""
    n_stages, n_entries, _ = books.shape
    by_element = np.ascontiguousarray(books.transpose(0, 2, 1), dtype=np.float32)
    table = np.empty((x.size // VEC_DIM, n_stages, n_entries), np.float32)
    expert_kernels.build_table(by_element, x, table, 0, len(table))
    scales = record.scales[kind].view(np.uint16)
    out, n_tiles = np.empty(scales.size, np.float32), -(-scales.size // TILE_ROWS)
    for start in range(0, n_tiles, tiles_at_once):
        stop = min(start + tiles_at_once, n_tiles)
        expert_kernels.multiply_tiles(record.indices[kind], table, scales, out, start, stop)
    return out


@given(quants, rows_of_tiles, st.integers(1, 140), seeds)
def test_one_matrix_equals_the_unpacked_one(quant: ExpertQuant, rows: int, n_vectors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (rows, n_vectors * VEC_DIM), "up": (rows, 8), "down": (8, 8)}
    record = random_record(rng, quant, shapes)
    books = normal(rng, 3, quant.n_stages, quant.n_entries, VEC_DIM).astype(np.float16)
    for n, kind in enumerate(KINDS):
        x = normal(rng, shapes[kind][1])
        found = product(record, kind, books[n], x, tiles_at_once=100)
        dense = dense_expert_matrix(record, kind, shapes[kind], books[n].astype(np.float64), quant)
        # stages may cancel each other, so the size of a sum is that of its stages
        table = np.einsum("sed,vd->vse", books[n].astype(np.float64), x.reshape(-1, VEC_DIM))
        close(found, dense @ x, np.abs(table).max(axis=2).sum() * record.scales[kind].astype(np.float64))
        assert np.array_equal(product(record, kind, books[n], x, tiles_at_once=1), found)


@given(quants, st.integers(1, 20), st.integers(1, 20), st.sampled_from([(0, 0), (4, 25)]), teams, seeds)
def test_a_whole_expert(
    quant: ExpertQuant, width: int, inner: int, betas: tuple[float, float], team: Team, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    width, inner = width * VEC_DIM, inner * VEC_DIM
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    record = random_record(rng, quant, shapes)
    books = (0.1 * normal(rng, 3, quant.n_stages, quant.n_entries, VEC_DIM)).astype(np.float16)
    x, one, several = normal(rng, width), LayerCodebooks(books, ONE), LayerCodebooks(books, team)
    found = one.experts([record], one.tables(x), Activation(*betas))[0]
    for again in several.experts([record, record, record], several.tables(x), Activation(*betas)):
        assert np.array_equal(again, found)
    gate, up, down = (
        dense_expert_matrix(record, kind, shapes[kind], books[n].astype(np.float64), quant)
        for n, kind in enumerate(KINDS)
    )
    middle = situ(gate @ x, up @ x, *betas) if betas[0] else (gate @ x) * sigmoid(gate @ x) * (up @ x)
    expected = down @ middle
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(np.abs(down) @ np.abs(middle))


@pytest.mark.parametrize("gathers", [True, False])
def test_look_ups_on_any_processor(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if gathers and not lanes._GATHERS:
        pytest.skip("this processor has no gather of sixteen numbers")
    monkeypatch.setattr(lanes, "_GATHERS", gathers)

    @numba.njit
    def look(table: F32, codes: npt.NDArray[np.uint8], out: F32) -> None:
        lanes.store(out, 0, lanes.look_up(lanes.load(out, 0), table, 5, codes, 2, 3, 1))
        lanes.store(out, 16, lanes.look_up_packed(lanes.load(out, 16), table, 7, codes, 1))

    rng = np.random.default_rng(0)
    table, codes = normal(rng, 900), rng.integers(256, size=60, dtype=np.uint8)
    out = normal(rng, 32)
    expected = out.copy()
    for lane in range(16):
        expected[lane] += table[5 + 256 * ((1 + lane) % 3) + int(codes[2 + lane])]
        bits = int.from_bytes(codes[1 + 3 * lane :][:3].tobytes(), "little")
        expected[16 + lane] += sum(table[7 + 64 * stage + (bits >> 6 * stage & 63)] for stage in range(4))
    look(table, codes, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_index_bytes_that_do_not_fit_the_table_are_refused() -> None:
    rng = np.random.default_rng(0)
    for quant in EXPERT_QUANTS.values():
        record = random_record(rng, quant, {"gate": (64, 32)})
        codebooks = LayerCodebooks(np.zeros((3, quant.n_stages, quant.n_entries, VEC_DIM), np.float16), ONE)
        assert record.indices["gate"].size == index_bytes((64, 32), quant)
        with pytest.raises(ValueError, match="do not fit"):
            codebooks.experts([record], codebooks.tables(np.zeros(24, np.float32)), Activation())


def test_a_vector_that_cannot_be_cut_has_no_table() -> None:
    codebooks = LayerCodebooks(np.zeros((3, 3, 256, 8), np.float16), ONE)
    with pytest.raises(ValueError, match="cannot be cut"):
        codebooks.tables(np.zeros(12, np.float32))

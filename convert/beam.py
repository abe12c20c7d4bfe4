"""Beam search for the entries of a residual codebook: the search behind `balanced` and `best`.

A vector x is approximated by one entry of every stage. With |x|² known, the squared error of a choice is

    |x - c1 - c2 - …|² = |x|² + Σ (|ci|² - 2 x·ci) + Σ 2 ci·cj  (i < j)

so that after one pass of inner products (x·c, once per stage) every further candidate costs a few additions from
tables of codeword·codeword products (Babenko & Lempitsky, "Additive Quantization", 2014). A beam keeps the
`width` best partial choices from stage to stage; the last stage is searched for its minimum only.

Picking the best is what a beam usually spends its time on. Here the candidates of a stage fall into buckets of
at most sixteen, one per lane and group of rows; each bucket keeps its smallest, and sorting networks then draw the
best `width` of the buckets for sixteen vectors at once. Two good candidates in one bucket are one
too few: that costs 0.05 points of error and saves most of the time (docs/encoding.md). While they are compared, the
costs carry the number of their candidate in their lowest bits, so they are exact to one part in 2,000 at width 16 and
in 500 at 64; the last stage is exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from convert.simd import (
    LARGEST,
    N_LANES,
    add,
    aligned,
    fma,
    load,
    lowest_lane,
    merge_rows,
    minimum,
    sort_rows,
    splat,
    store,
    tagged,
    transpose,
    where_less,
)

Array = npt.NDArray[Any]

MAX_STAGES = 4
MOST_GROUPS = 4
MAX_WIDTH = N_LANES * MOST_GROUPS  # buckets of the first stage
# Bits for the row within a bucket.
ROW_BITS = 4


@dataclass(frozen=True)
class BeamTables:
    """Codebooks made ready for the search; flat f32 arrays on 64-byte boundaries."""

    n_stages: int
    n_entries: int
    columns: Array  # [stages, n / 16, 8, 16]: -2 × the entries, sixteen side by side
    norms: Array  # [stages, n]: |c|²
    products: Array  # [stages, stages, n, n]: 2 ci·cj for i < j

    @classmethod
    def of(cls, entries: npt.NDArray[np.float32]) -> BeamTables:
        """Tables of `entries` [stages, n, 8], 2 to 4 stages, n a multiple of 16."""
        n_stages, n_entries, dim = entries.shape
        columns = -2 * entries.reshape(n_stages, n_entries // N_LANES, N_LANES, dim).transpose(0, 1, 3, 2)
        norms = np.square(entries).sum(axis=-1)
        products = np.zeros((n_stages, n_stages, n_entries, n_entries), dtype=np.float32)
        for i in range(n_stages):
            for j in range(i + 1, n_stages):
                # not a matrix product, whose rounding depends on the library and its threads
                products[i, j] = 2 * np.einsum("ad,bd->ab", entries[i], entries[j])
        return cls(n_stages, n_entries, *(_aligned_copy(part) for part in (columns, norms, products)))


def beam_search(vectors: npt.NDArray[np.float32], tables: BeamTables, width: int) -> npt.NDArray[np.uint8]:
    """Codes [n, stages] of `vectors` [n, 8] by a beam of `width`. Raises ValueError for a width it cannot have."""
    if not 1 < width <= min(MAX_WIDTH, tables.n_entries):
        raise ValueError(f"a beam of {width} among {tables.n_entries} entries")
    codes = np.empty((len(vectors), tables.n_stages), dtype=np.uint8)
    search = _compiled(tables.n_entries, tables.n_stages)
    search(vectors, tables.columns, tables.norms, tables.products, width, codes)
    return codes


@functools.cache
def _compiled(n: int, n_stages: int) -> Any:
    """The search compiled for this number of entries and stages: inner loops of known length run 1.1 × as fast."""

    @numba.njit(cache=True, nogil=True)
    def search(vectors: Array, columns: Array, norms: Array, products: Array, width: int, codes: Array) -> None:
        _search(vectors, columns, norms, products, n, n_stages, width, codes)

    return search


def _aligned_copy(values: Array) -> Array:
    copy: Array = aligned(values.size)
    copy[:] = values.reshape(-1)
    return copy


@numba.njit(cache=True)
def bucket_groups(stage: int, width: int) -> int:
    """Groups of rows in which a beam's candidates are cut; with the lanes they make its buckets.

    The first stage has one beam only, whose buckets must be enough for the next. In wide beams, twice the buckets
    gain more than more beams would.
    """
    if stage == 0:
        return MOST_GROUPS
    return 2 if width > N_LANES else 1


@numba.njit(cache=True, nogil=True)
def _search(
    vectors: Array, columns: Array, norms: Array, products: Array, n: int, n_stages: int, width: int, codes: Array
) -> None:
    """Sixteen vectors at a time: inner products, then stage after stage.

    Arrays are handed on whole, with indices: a slice in an inner loop would cost as much as a table row.
    """
    x = np.zeros((N_LANES, 8), dtype=np.float32)
    dots = aligned(n_stages * N_LANES * n)
    keys = aligned(N_LANES * N_LANES * max(MOST_GROUPS, bucket_groups(1, width) * width))
    turned = aligned(N_LANES * N_LANES)
    top = aligned(N_LANES * N_LANES * -(-width // N_LANES))
    costs = np.empty((N_LANES, width), dtype=np.float32)
    picks = np.zeros((N_LANES, width, MAX_STAGES), dtype=np.int64)
    old = np.zeros((width, MAX_STAGES), dtype=np.int64)
    for start in range(0, len(vectors), N_LANES):
        count = min(N_LANES, len(vectors) - start)
        for v in range(count):
            for d in range(8):
                x[v, d] = vectors[start + v, d]
        _inner_products(x, columns, norms, n, n_stages, dots)
        for v in range(N_LANES):
            costs[v, 0] = 0
            for d in range(8):
                costs[v, 0] += x[v, d] * x[v, d]
        for stage in range(n_stages - 1):
            n_beams, groups = width if stage else 1, bucket_groups(stage, width)
            _fill_all(dots, products, picks, costs, stage, n, n_stages, n_beams, groups, keys)
            n_buckets = n_beams * groups * N_LANES
            _draw_smallest(keys, n_buckets, turned, top)
            _take(top, top.view(np.int32), n_buckets, groups, stage, costs, picks, old)
        for v in range(count):
            _finish(dots, v, products, picks, costs, n, n_stages, turned, codes, start + v)


@numba.njit(cache=True, nogil=True)
def _inner_products(x: Array, columns: Array, norms: Array, n: int, n_stages: int, dots: Array) -> None:
    """dots[stage, v, c] = |c|² - 2 x[v]·c; two vectors at a time, so that each entry is loaded half as often."""
    for v in range(0, N_LANES, 2):
        a0, a1, a2, a3 = splat(x[v, 0]), splat(x[v, 1]), splat(x[v, 2]), splat(x[v, 3])
        a4, a5, a6, a7 = splat(x[v, 4]), splat(x[v, 5]), splat(x[v, 6]), splat(x[v, 7])
        w = v + 1
        b0, b1, b2, b3 = splat(x[w, 0]), splat(x[w, 1]), splat(x[w, 2]), splat(x[w, 3])
        b4, b5, b6, b7 = splat(x[w, 4]), splat(x[w, 5]), splat(x[w, 6]), splat(x[w, 7])
        for stage in range(n_stages):
            for row in range(stage * n, stage * n + n, N_LANES):
                norm, at = load(norms, row), row * 8
                c = load(columns, at)
                a, b = fma(a0, c, norm), fma(b0, c, norm)
                c = load(columns, at + 1 * N_LANES)
                a, b = fma(a1, c, a), fma(b1, c, b)
                c = load(columns, at + 2 * N_LANES)
                a, b = fma(a2, c, a), fma(b2, c, b)
                c = load(columns, at + 3 * N_LANES)
                a, b = fma(a3, c, a), fma(b3, c, b)
                c = load(columns, at + 4 * N_LANES)
                a, b = fma(a4, c, a), fma(b4, c, b)
                c = load(columns, at + 5 * N_LANES)
                a, b = fma(a5, c, a), fma(b5, c, b)
                c = load(columns, at + 6 * N_LANES)
                a, b = fma(a6, c, a), fma(b6, c, b)
                c = load(columns, at + 7 * N_LANES)
                target = (stage * (N_LANES - 1) + v) * n + row
                store(dots, target, fma(a7, c, a))
                store(dots, target + n, fma(b7, c, b))


@numba.njit(cache=True, nogil=True)
def _candidates(dots: Array, at: int, products: Array, tables: tuple[int, ...], row: int) -> Any:
    """What sixteen entries from `row` on of this stage would add to the squared error, given the beam's choices."""
    cost = load(dots, at + row)
    for table in tables:
        cost = add(cost, load(products, table + row))
    return cost


@numba.njit(cache=True, nogil=True)
def _table(picks: Array, v: int, b: int, i: int, stage: int, n: int, n_stages: int) -> Any:
    """Where in `products` the row of stage i's chosen entry with all entries of `stage` begins."""
    return ((i * n_stages + stage) * n + picks[v, b, i]) * n


@numba.njit(cache=True, nogil=True)
def _fill_all(
    dots: Array, products: Array, picks: Array, costs: Array, stage: int, n: int, n_stages: int, n_beams: int,
    groups: int, keys: Array,
) -> None:  # fmt: skip
    """The buckets of all beams of sixteen vectors; compiled for each number of tables."""
    for v in range(N_LANES):
        at = (stage * N_LANES + v) * n
        for b in range(n_beams):
            first = (v * n_beams + b) * groups * N_LANES
            if stage == 0:
                _fill(dots, at, products, (0,), n, costs[v, b], groups, keys, first)  # products begins with zeros
            elif stage == 1:
                tables = (_table(picks, v, b, 0, stage, n, n_stages),)
                _fill(dots, at, products, tables, n, costs[v, b], groups, keys, first)
            else:
                two_tables = (_table(picks, v, b, 0, stage, n, n_stages), _table(picks, v, b, 1, stage, n, n_stages))
                _fill(dots, at, products, two_tables, n, costs[v, b], groups, keys, first)


@numba.njit(cache=True, nogil=True)
def _fill(
    dots: Array, at: int, products: Array, tables: tuple[int, ...], n: int, cost: float, groups: int,
    keys: Array, first: int,
) -> None:  # fmt: skip
    """One beam's buckets: groups × 16 smallest costs, with the row within the bucket in their lowest bits."""
    base = splat(np.float32(cost))
    for group in range(groups):
        smallest, number = splat(LARGEST), np.int32(0)
        for row in range(group * N_LANES, n, groups * N_LANES):
            total = add(_candidates(dots, at, products, tables, row), base)
            smallest = minimum(smallest, tagged(total, np.int32((1 << ROW_BITS) - 1), number))
            number += np.int32(1)
        store(keys, first + group * N_LANES, smallest)


@numba.njit(cache=True, nogil=True)
def _draw_smallest(keys: Array, n_buckets: int, turned: Array, top: Array) -> None:
    """top[j, v] = the j-th smallest of keys[v, :], with the number of its bucket above the row.

    Sixteen buckets at a time are sorted and merged into sorted lists of sixteen, of which `top` holds enough.
    """
    for at in range(0, len(top), N_LANES):
        store(top, at, splat(LARGEST))
    mask = _tag_mask(n_buckets) & ~np.int32((1 << ROW_BITS) - 1)
    for first in range(0, n_buckets, N_LANES):
        transpose(keys, first, turned, 0, n_buckets)
        for lane in range(N_LANES):
            key = tagged(load(turned, N_LANES * lane), mask, np.int32((first + lane) << ROW_BITS))
            store(turned, N_LANES * lane, key)
        sort_rows(turned, 0)
        for at in range(0, len(top), N_LANES * N_LANES):
            merge_rows(top, at, turned, 0)


@numba.njit(cache=True, nogil=True)
def _tag_mask(n_buckets: int) -> Any:
    """The lowest bits of a cost, which hold the number of its bucket and below it the row within."""
    mask = (1 << ROW_BITS) - 1
    while mask < (n_buckets << ROW_BITS) - 1:
        mask = 2 * mask + 1
    return np.int32(mask)


@numba.njit(cache=True, nogil=True)
def _take(
    top: Array, bits: Array, n_buckets: int, groups: int, stage: int, costs: Array, picks: Array, old: Array
) -> None:
    """Read the drawn candidates' numbers: new costs and choices of every beam."""
    width = costs.shape[1]
    tag_mask = _tag_mask(n_buckets)
    group_bits = groups >> 1  # of 1, 2 or 4 groups; divisions would take as long as all the rest
    for v in range(N_LANES):
        for j in range(width):
            for i in range(stage):
                old[j, i] = picks[v, j, i]
        for j in range(width):
            key = bits[N_LANES * j + v]
            tag = key & tag_mask
            row, bucket = tag & ((1 << ROW_BITS) - 1), tag >> ROW_BITS
            lane, block = bucket % N_LANES, bucket // N_LANES
            group, beam = block & (groups - 1), block >> group_bits
            for i in range(stage):
                picks[v, j, i] = old[beam, i]
            picks[v, j, stage] = (row * groups + group) * N_LANES + lane
            bits[N_LANES * j + v] = key & ~tag_mask
            costs[v, j] = top[N_LANES * j + v]


@numba.njit(cache=True, nogil=True)
def _finish(
    dots: Array, v: int, products: Array, picks: Array, costs: Array, n: int, n_stages: int, lanes: Array,
    codes: Array, target: int,
) -> None:  # fmt: skip
    """The last stage: the one cheapest entry over all beams of a vector, and its code."""
    stage = n_stages - 1
    at = (stage * N_LANES + v) * n
    best, winner = splat(LARGEST), splat(np.float32(0))
    for b in range(costs.shape[1]):
        t0 = _table(picks, v, b, 0, stage, n, n_stages)
        t1 = _table(picks, v, b, 1, stage, n, n_stages)
        t2 = _table(picks, v, b, 2, stage, n, n_stages)
        if stage == 1:
            smallest = _lowest(dots, at, products, (t0,), n)
        elif stage == 2:
            smallest = _lowest(dots, at, products, (t0, t1), n)
        else:
            smallest = _lowest(dots, at, products, (t0, t1, t2), n)
        smallest = add(smallest, splat(costs[v, b]))
        winner = where_less(smallest, best, splat(np.float32(b)), winner)
        best = minimum(smallest, best)
    lane = lowest_lane(best)
    store(lanes, 0, winner)
    b = int(lanes[lane])
    for i in range(stage):
        codes[target, i] = picks[v, b, i]
    lowest, found = LARGEST, 0
    for entry in range(lane, n, N_LANES):
        cost = dots[at + entry]
        for i in range(stage):
            cost += products[_table(picks, v, b, i, stage, n, n_stages) + entry]
        if cost < lowest:
            lowest, found = cost, entry
    codes[target, stage] = found


@numba.njit(cache=True, nogil=True)
def _lowest(dots: Array, at: int, products: Array, tables: tuple[int, ...], n: int) -> Any:
    """The smallest candidate of each lane."""
    smallest = splat(LARGEST)
    for row in range(0, n, N_LANES):
        smallest = minimum(smallest, _candidates(dots, at, products, tables, row))
    return smallest

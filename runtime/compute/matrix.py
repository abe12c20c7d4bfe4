"""A trunk matrix as the runtime keeps it: quantised as stored, multiplied without ever being unpacked as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE, TrunkFormat, align_up
from runtime.compute import products, trunk_kernels
from runtime.compute.gates import F32
from runtime.compute.team import Team

U8 = npt.NDArray[np.uint8]

# per format: how the kernels see the stored values, the product with rows, and with their transpose
_DTYPES: dict[TrunkFormat, npt.DTypeLike] = {
    TrunkFormat.F32: "<f4",
    TrunkFormat.Q8G: np.int8,
    TrunkFormat.Q4G: np.uint8,
}
_MATVEC: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: trunk_kernels.f32_matvec,
    TrunkFormat.Q8G: trunk_kernels.q8g_matvec,
    TrunkFormat.Q4G: trunk_kernels.q4g_matvec,
}
_TRANSPOSED: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: trunk_kernels.f32_transposed,
    TrunkFormat.Q8G: trunk_kernels.q8g_transposed,
    TrunkFormat.Q4G: trunk_kernels.q4g_transposed,
}
# Products of fewer weights are not shared between threads: waking one takes as long.
_LEAST_WEIGHTS = 1 << 16


class Matrix:
    """A trunk matrix [rows, cols] in its stored bytes.

    `values` are [rows, row_bytes] uint8 as stored, `scales` [rows, groups] f16 ([rows, 0] for F32). Neither is
    copied, unless its address is no multiple of its elements' size, as containers of other writers may have it.
    """

    def __init__(self, values: U8, scales: npt.NDArray[np.float16], cols: int, fmt: TrunkFormat, team: Team) -> None:
        elements, self._scale_bits = aligned(aligned(values).view(_DTYPES[fmt])), scale_bits(scales)
        self.values, self.scales = elements.view(np.uint8), self._scale_bits.view(np.float16)
        self.rows, self.cols, self.fmt = len(values), cols, fmt
        self.team = team
        # as the one-token kernels take them: elements or groups
        self._elements = elements if fmt is TrunkFormat.F32 else elements.reshape(*scales.shape, -1)

    def __call__(self, x: F32) -> F32:
        """The products with each row of x: [T, cols] → [T, rows]."""
        return multiply_all([self], x)[0]

    def matvec_heads(self, x: F32, *, stride: int, first: int, count: int) -> F32:
        """Rows `h * stride + first` and the `count - 1` after them, times x[h]: x [heads, cols] → [heads, count]."""
        self._check(x, self.cols, stride, first, count)
        out = np.empty((len(x), count), dtype=np.float32)
        work = self._products(_in_groups(x, self.fmt), stride, first, out)
        self.team.run(work, out.size, least=self._least_rows())
        return out

    def transposed_heads(self, x: F32, *, stride: int, first: int) -> F32:
        """Sum of rows `h * stride + first + i`, each times x[h, i]: x [heads, count] → [heads, cols]."""
        self._check(x, x.shape[1], stride, first, x.shape[1])
        out = np.empty((len(x), *self._transposed_shape()), dtype=np.float32)
        kernel, x = _TRANSPOSED[self.fmt], np.ascontiguousarray(x)
        work = partial(kernel, self._elements, self._scale_bits, x, stride, first, out)
        self.team.run(work, len(x), least=max(1, self._least_rows() // x.shape[1]))
        if self.fmt is TrunkFormat.Q4G:
            out = np.moveaxis(out, 1, -1)
        return np.ascontiguousarray(out.reshape(len(x), -1)[:, : self.cols])

    def _products(self, groups: F32, stride: int, first: int, out: F32) -> Callable[[int, int], None]:
        """The work whose items are the elements of `out`."""
        return partial(_MATVEC[self.fmt], self._elements, self._scale_bits, groups, stride, first, out)

    def _least_rows(self) -> int:
        return _LEAST_WEIGHTS // self.cols + 1

    def _transposed_shape(self) -> tuple[int, ...]:
        """What the kernels make of one row: groups, for Q4G with even and odd elements apart."""
        if self.fmt is TrunkFormat.F32:
            return (self.cols,)
        groups: tuple[int, ...] = self._elements.shape[1:]
        return (2, *groups) if self.fmt is TrunkFormat.Q4G else groups

    def _check(self, x: F32, width: int, stride: int, first: int, count: int) -> None:
        """The kernels check nothing, so a caller's mistake must end here."""
        last = (len(x) - 1) * stride + first + count
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != width or first < 0 or last > self.rows:
            raise ValueError(
                f"{x.dtype} {list(x.shape)} with stride {stride}, first {first}, count {count} does not fit a matrix "
                f"of {self.rows} × {self.cols}"
            )


def multiply_all(matrices: Sequence[Matrix], x: F32) -> list[F32]:
    """Each matrix's products with x [T, cols], as [T, rows]; those with one token share a single piece of team work."""
    for matrix in matrices:
        matrix._check(x, matrix.cols, 0, 0, matrix.rows)
    if len(x) != 1:
        return [products.multiply(matrix, x) for matrix in matrices]
    groups = {fmt: _in_groups(x, fmt) for fmt in {matrix.fmt for matrix in matrices}}
    outs = [np.empty((1, matrix.rows), dtype=np.float32) for matrix in matrices]
    works = [
        (matrix._products(groups[matrix.fmt], 0, 0, out), matrix.rows)
        for matrix, out in zip(matrices, outs, strict=True)
    ]
    matrices[0].team.run_all(works, least=matrices[0]._least_rows())
    return outs


def scale_bits(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    """The bits of f16 scales, as kernels take them: contiguous, at even addresses; copied only where they are not."""
    return aligned(scales).view(np.uint16)


def _in_groups(x: F32, fmt: TrunkFormat) -> F32:
    """x [heads, cols] as the kernels take it: in groups filled up with zeros; for Q4G in the order of its nibbles."""
    if fmt is TrunkFormat.F32:
        return np.ascontiguousarray(x)
    groups = np.empty((len(x), align_up(x.shape[1], GROUP_SIZE) // GROUP_SIZE, GROUP_SIZE), dtype=np.float32)
    if fmt is TrunkFormat.Q4G:
        trunk_kernels.in_words(np.ascontiguousarray(x), groups)
        return groups
    flat = groups.reshape(len(x), -1)
    flat[:, : x.shape[1]] = x
    flat[:, x.shape[1] :] = 0
    return groups


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, copied where it is not contiguous or its address is no multiple of its elements' size."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()

"""A trunk matrix as the runtime keeps it: quantised as stored, multiplied without ever being unpacked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from container.layout import GROUP_SIZE, TrunkFormat, align_up
from runtime import kernels
from runtime.gates import F32

U8 = npt.NDArray[np.uint8]

# per format: how the kernels see the stored values, the product with rows, and with their transpose
_DTYPES: dict[TrunkFormat, npt.DTypeLike] = {
    TrunkFormat.F32: "<f4",
    TrunkFormat.Q8G: np.int8,
    TrunkFormat.Q4G: np.uint8,
}
_MATVEC: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: kernels.f32_matvec,
    TrunkFormat.Q8G: kernels.q8g_matvec,
    TrunkFormat.Q4G: kernels.q4g_matvec,
}
_TRANSPOSED: dict[TrunkFormat, Callable[..., None]] = {
    TrunkFormat.F32: kernels.f32_transposed,
    TrunkFormat.Q8G: kernels.q8g_transposed,
    TrunkFormat.Q4G: kernels.q4g_transposed,
}


class Matrix:
    """A trunk matrix [rows, cols] in its stored bytes, with group scales widened to f32.

    `values` are [rows, row_bytes] uint8 as stored, `scales` [rows, groups] f16 ([rows, 0] for F32).
    """

    def __init__(self, values: U8, scales: npt.NDArray[np.float16], cols: int, fmt: TrunkFormat) -> None:
        self.fmt = fmt
        self.rows, self.cols = len(values), cols
        self._scales = scales.astype(np.float32)
        self._values = values.view(_DTYPES[fmt])
        if fmt is not TrunkFormat.F32:
            self._values = self._values.reshape(*scales.shape, -1)

    def matvec(self, x: F32) -> F32:
        """The product with x [cols], as [rows]."""
        return self.matvec_heads(x.reshape(1, -1), stride=0, first=0, count=self.rows).reshape(-1)

    def matvec_heads(self, x: F32, *, stride: int, first: int, count: int) -> F32:
        """Rows `h * stride + first` and the `count - 1` after them, times x[h]: x [heads, cols] → [heads, count]."""
        self._check(x, self.cols, stride, first, count)
        out = np.empty((len(x), count), dtype=np.float32)
        _MATVEC[self.fmt](self._values, self._scales, self._in_groups(x), stride, first, out)
        return out

    def transposed_heads(self, x: F32, *, stride: int, first: int) -> F32:
        """Sum of rows `h * stride + first + i`, each times x[h, i]: x [heads, count] → [heads, cols]."""
        self._check(x, x.shape[1], stride, first, x.shape[1])
        out = np.empty_like(self._in_groups(np.zeros((len(x), self.cols), dtype=np.float32)))
        _TRANSPOSED[self.fmt](self._values, self._scales, np.ascontiguousarray(x), stride, first, out)
        if self.fmt is TrunkFormat.Q4G:
            out = np.moveaxis(out, 1, -1)
        return np.ascontiguousarray(out.reshape(len(x), -1)[:, : self.cols])

    def _in_groups(self, x: F32) -> F32:
        """x [heads, cols] as the kernels take it: in groups filled up with zeros; for Q4G even and odd apart."""
        if self.fmt is TrunkFormat.F32:
            return np.ascontiguousarray(x)
        padded = align_up(self.cols, GROUP_SIZE)
        if padded != self.cols:
            wide = np.zeros((len(x), padded), dtype=np.float32)
            wide[:, : self.cols] = x
            x = wide
        if self.fmt is TrunkFormat.Q8G:
            return np.ascontiguousarray(x.reshape(len(x), -1, GROUP_SIZE))
        return np.ascontiguousarray(np.moveaxis(x.reshape(len(x), -1, GROUP_SIZE // 2, 2), -1, 1))

    def _check(self, x: F32, width: int, stride: int, first: int, count: int) -> None:
        """The kernels check nothing, so a caller's mistake must end here."""
        last = (len(x) - 1) * stride + first + count
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != width or first < 0 or last > self.rows:
            raise ValueError(
                f"{x.dtype} {list(x.shape)} with stride {stride}, first {first}, count {count} does not fit a matrix "
                f"of {self.rows} × {self.cols}"
            )

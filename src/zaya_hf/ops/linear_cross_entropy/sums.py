"""The gradient of the weight: a sum of products over chunks of rows."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..linear import product
from ..numerics import wide_dtype

#: elements of the sum that are added at once, where adding takes more than the product itself
SLICE_ELEMENTS = {"cpu": 2**22}
ELSEWHERE = 2**28  # a product of fewer columns would leave compute units idle
#: slices are whole tiles of a product
TILE = 256


class ProductSum:
    """``sum(d.T @ x)`` over chunks, in the dtype of a weight. A narrow dtype rounds each product and the sum of all,
    but no sum on the way, so the error does not grow with the chunks.

    Args:
        weight: ``[V, D]``, whose gradient this is.
        several: whether there are several chunks.
        kernels: the module of Triton's kernels, if they are to add; None: torch does.
    """

    def __init__(self, weight: Tensor, several: bool, kernels: ModuleType | None = None):
        self.weight, self.wide = weight, wide_dtype(weight.dtype)
        self.narrow, self.several, self.kernels = self.wide != weight.dtype, several, kernels
        self.total: Tensor | None = None
        self.rest: Tensor | None = None  # what rounding took from the total

    def add(self, d: Tensor, x: Tensor) -> None:
        """``[T, V]`` and ``[T, D]``, in one dtype."""
        if d.dtype == self.weight.dtype and self.total is None:
            self.total = product(d.t(), x.t())
        elif d.dtype == self.weight.dtype and not self.narrow:
            self.result().addmm_(d.t(), x)
        else:
            self._add_slices(d, x)

    def _add_slices(self, d: Tensor, x: Tensor) -> None:
        if self.total is None:
            self.total = self._zeros()
        if self.rest is None and self.narrow and self.several:
            self.rest = self._zeros()
        words, width = self.weight.shape
        rows = slice_rows(words, width, d.device.type)
        space = d.new_empty(rows, width)
        add = self._add_by_kernel if self.kernels is not None and self.rest is not None else _Addition(self.wide, space)
        for start in range(0, words, rows):
            part = slice(start, start + rows)
            total = self.total[part]
            found = torch.mm(d[:, part].t(), x, out=space[: total.shape[0]])
            if self.narrow:
                add(total, None if self.rest is None else self.rest[part], found)
            else:
                total += found

    def _add_by_kernel(self, total: Tensor, rest: Tensor | None, part: Tensor) -> None:
        assert self.kernels is not None
        self.kernels.add(total, rest, part)

    def _zeros(self) -> Tensor:
        return self.weight.new_zeros(self.weight.shape)

    def result(self) -> Tensor:
        """``[V, D]``, contiguous."""
        if self.total is None:
            self.total = self._zeros()
        return self.total


class _Addition:
    """``total += part`` in a wider dtype, with what rounding took from the total before, `rest`.

    Args:
        wide: fp32 or wider.
        space: as large as the largest part.
    """

    def __init__(self, wide: torch.dtype, space: Tensor):
        # Reused from slice to slice: a CPU spends more on fresh memory of this size than on the sums.
        self.sums, self.others = (torch.empty_like(space, dtype=wide) for _ in range(2))

    def __call__(self, total: Tensor, rest: Tensor | None, part: Tensor) -> None:
        number = total.shape[0]
        exact, other = self.sums[:number].copy_(total), self.others[:number]
        exact += other.copy_(part)
        if rest is None:
            total.copy_(exact)
            return
        exact += other.copy_(rest)
        total.copy_(exact)
        exact -= other.copy_(total)
        rest.copy_(exact)


def slice_rows(words: int, width: int, device: str) -> int:
    """Rows of one slice of ``[words, width]``. On accelerators slices are about equal, and whole tiles."""
    most = min(words, max(1, SLICE_ELEMENTS.get(device, ELSEWHERE) // max(1, width)))
    if device in SLICE_ELEMENTS:
        return most
    equal = -(-words // max(1, -(-words // most))) if most else 0
    return min(words, -(-equal // TILE) * TILE)

"""Pages of vLLM's CPU cache: layout of its kernels, and reading and writing of entries."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from vllm import _custom_ops as ops

# Numbers distinguishable in 16 bits.
MOST = 1 << 15


class PageLayout:
    """Order of the numbers of a page, by KV head.

    A kernel may interleave channels and entries for its instructions. The order is found by storing numbered keys and
    values and locating them, so that no kernel's layout is hard-coded.

    Args:
        isa: the kernel's name.
        page: entries of a page.
        dim: channels.
        dtype: of the cache.
    """

    def __init__(self, isa: str, page: int, dim: int, dtype: torch.dtype) -> None:
        self.page = page
        self.dim = dim
        numbers = torch.arange(page * dim)
        pattern = numbers.to(dtype)
        if dtype.itemsize == 2:
            # Few 16-bit floats are whole numbers; their bits are moved as they are.
            if page * dim > MOST:
                raise NotImplementedError(f"pages of {page} entries of {dim} channels have more numbers than 16 bits")
            pattern = numbers.to(torch.int16).view(dtype)
        pattern = pattern.view(page, 1, dim)
        cache = torch.zeros(1, 1, 2 * page, dim, dtype=dtype)
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(pattern, pattern.clone(), keys, values, torch.arange(page), isa)
        self._to = []
        self._from = []
        for half in (keys, values):
            found = half.contiguous().view(-1)
            found = (found.view(torch.int16) if dtype.itemsize == 2 else found).long()
            if not found.sort().values.equal(numbers):
                raise NotImplementedError(f"the kernel {isa} does not store every number of a page once, as it is")
            self._to.append(found)
            self._from.append(found.argsort())

    def read(self, cache: Tensor, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [heads, size, dim] of the first `size` entries of int64 `pages`, in order.

        cache: [pages, heads, page, 2 * dim], as vLLM has it.
        """
        halves = self._halves(cache)[pages]
        keys, values = (
            halves[:, :, half][..., self._from[half]]
            .unflatten(2, (self.page, self.dim))
            .transpose(0, 1)
            .flatten(1, 2)[:, :size]
            for half in (0, 1)
        )
        return keys, values

    def write(self, cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill int64 `pages` with keys and values [heads, len(pages) * page, dim]; cache as in `read`."""
        halves = self._halves(cache)
        for half, part in enumerate((keys, values)):
            paged = part.reshape(len(part), len(pages), self.page * self.dim).transpose(0, 1)
            halves[pages, :, half] = paged[..., self._to[half]]

    def _halves(self, cache: Tensor) -> Tensor:
        return cache.view(*cache.shape[:2], 2, self.page * self.dim)


@functools.cache
def page_layout(isa: str, page: int, dim: int, dtype: torch.dtype) -> PageLayout:
    """Return the cached layout of a kernel's pages."""
    return PageLayout(isa, page, dim, dtype)

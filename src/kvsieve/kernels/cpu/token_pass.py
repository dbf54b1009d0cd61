"""Python interface of the C kernel for a token's way through several decoder layers and their stored entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu.build import function
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer, kernel_addresses
from kvsieve.kernels.cpu.token import TokenFields


class _StoredFields(Structure):
    """A layer and its entries, `Stored` of token.c."""

    _fields_ = (
        *(("layer", c_void_p), ("job", TokenFields), ("index", c_void_p)),
        *((name, c_int64) for name in ("stride", "written")),
    )


class _PassFields(Structure):
    """The `Pass` of token.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("before", "after", "layers", "cosine", "sine", "scratch")),
        *((name, c_int64) for name in ("count", "dim", "wide", "angles", "index")),
    )


class TokenPass:
    """Way of a token of each row through decoder layers, each of which stores it and attends to all of its entries.

    Args:
        layers: in order; the caller keeps their weights alive.
        scales: factor of each layer's query-key products.
        batch: rows.
        dtype: of hidden states and entries, float32 or bfloat16.
        lanes: of entries in different numbers per head, attention may read slots up to the next multiple of it.

    Attributes:
        layers: as given.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], scales: Sequence[float], batch: int, dtype: torch.dtype, lanes: int
    ) -> None:
        self.layers = layers
        self._batch = batch
        self._heads = [layer.widths[1] // layer.head for layer in layers]
        every = (_StoredFields * len(layers))()
        self._stored = list(every)
        self._jobs = [fields.job for fields in self._stored]
        for fields, layer, scale, heads in zip(self._stored, layers, scales, self._heads, strict=True):
            job = fields.job
            job.batch, job.heads, job.groups, job.dim = batch, heads, layer.widths[0] // layer.widths[1], layer.head
            job.fresh = 1
            job.half = dtype == torch.bfloat16
            job.item = dtype.itemsize
            job.scale = scale
            fields.layer = layer.address
            fields.written = lanes
        wide = max(width for layer in layers for width in layer.widths[:3])
        dim = layers[0].dim
        # Of a row, in numbers; see token.c and layers.c.
        self._scratch = 4 * wide + 2 * dim + max(wide, *(2 * layer.widths[4] for layer in layers))
        before, after = kernel_addresses()
        self._fields = _PassFields(before, after, addressof(every), count=len(layers), dim=dim, wide=wide)

    def place(self, number: int, tensors: Sequence[Tensor | None], size: int) -> bool:
        """Set the entries that a layer's token joins and attends to; return False for another layout.

        Args:
            number: of the layer.
            tensors: buffers of keys [B, H, N, D] or [B, N, D], of values, of token indices, and for the latter keys
                each head's bias [B, H, N].
            size: slots in use; there is room for the token.
        """
        keys, values, index, marks = tensors[:4]
        job = self._jobs[number]
        fields = self._stored[number]
        heads = self._heads[number]
        assert keys is not None
        *front, slots, dim = keys.shape
        if dim != job.dim or not all(map(Tensor.is_contiguous, filter(_is_some, tensors[:4]))):
            return False
        if marks is None and front == [self._batch, heads]:
            job.seen = None
            job.row = heads * slots
            job.head = slots
            fields.stride = 1
        elif marks is not None and front == [self._batch] and marks.shape[1] == heads:
            job.seen = marks.data_ptr()
            job.seen_row = heads * slots
            job.seen_head = job.row = slots
            job.head = 0
            fields.stride = heads
        else:
            return False
        job.keys = keys.data_ptr()
        job.values = values.data_ptr()  # type: ignore[union-attr]
        fields.index = index.data_ptr()  # type: ignore[union-attr]
        job.size = size
        return True

    def run(self, x: Tensor, cosine: Tensor, sine: Tensor, index: int) -> Tensor:
        """Return the last layer's output [B, 1, C]; every layer's entries have become one more.

        Args:
            x: [B, 1, C], the first layer's input, contiguous.
            cosine: [B or 1, 1, D], contiguous, of the dtype of `x`.
            sine: the same.
            index: token index of the token in its row.
        """
        scratch = x.new_empty(self._batch * self._scratch)
        out = torch.empty_like(x)
        fields = self._fields
        fields.cosine = cosine.data_ptr()
        fields.sine = sine.data_ptr()
        fields.scratch = scratch.data_ptr()
        fields.angles = len(cosine)
        fields.index = index
        if not _through_layers()(byref(fields), x.data_ptr(), out.data_ptr(), torch.get_num_threads()):
            raise MemoryError("there is no memory for a copy of a layer's input")
        return out


def _is_some(tensor: Tensor | None) -> bool:
    return tensor is not None


@functools.cache
def _through_layers() -> Callable[..., int]:
    return function("token", "through_layers", *(c_void_p,) * 3, c_int64, returns=c_int64)


__all__ = ["TokenPass"]

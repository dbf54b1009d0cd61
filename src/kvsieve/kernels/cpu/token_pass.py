"""Python interface of the C kernel for the way of tokens through several decoder layers and their stored entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_int64, c_void_p

import torch
from torch import Tensor

from kvsieve.kernels.cpu import prompt
from kvsieve.kernels.cpu.build import function
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer, kernel_addresses
from kvsieve.kernels.cpu.token import TokenFields


class _StoredFields(Structure):
    """A layer and its entries, `Stored` of token.c."""

    _fields_ = (
        *(("layer", c_void_p), ("job", TokenFields), ("index", c_void_p)),
        *((name, c_int64) for name in ("stride", "written", "few")),
    )


class _RowsFields(Structure):
    """The `Rows` of token.c."""

    _fields_ = (("layers", c_void_p), ("index", c_int64))


class _PassFields(Structure):
    """The `Pass` of token.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("before", "after", "few", "caches", "cosine", "sine", "scratch")),
        *((name, c_int64) for name in ("number", "count", "rows", "dim", "wide", "angles", "half")),
    )


class TokenEntries:
    """Entries of all layers of a cache, which the next tokens of each row join and attend to.

    Args:
        layers: in order; the caller keeps their weights alive.
        scales: factor of each layer's query-key products.
        batch: rows.
        tokens: of each row.
        dtype: of hidden states and entries, float32 or bfloat16.
        lanes: of entries in different numbers per head, attention may read slots up to the next multiple of it.
        few: of each layer, True where the kernel of prompt.py attends.

    Attributes:
        layers: as given.
        batch: rows.
        tokens: of each row.
        address: of the kernel's description.
        uses_few: True if any of `few` is.
        wide: most channels of all heads' queries, keys or values.
        scratch: numbers that the kernel needs room for, for each token of a pass.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        scales: Sequence[float],
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        lanes: int,
        few: Sequence[bool],
    ) -> None:
        self.layers = layers
        self.batch = batch
        self.tokens = tokens
        self._dtype = dtype
        self._lanes = lanes
        self._few = few
        self.uses_few = any(few)
        self.wide = max(width for layer in layers for width in layer.widths[:3])
        # Of a token, in numbers; see token.c and layers.c.
        dim = layers[0].dim
        self.scratch = 4 * self.wide + 2 * dim + max(self.wide, *(2 * layer.widths[4] for layer in layers))
        self._heads = [layer.widths[1] // layer.head for layer in layers]
        every = (_StoredFields * len(layers))()
        self.address = addressof(every)
        self._stored = list(every)
        self._jobs = [fields.job for fields in self._stored]
        for fields, job, layer, scale in zip(self._stored, self._jobs, layers, scales, strict=True):
            job.batch = batch
            job.heads = layer.widths[1] // layer.head
            job.groups = layer.widths[0] // layer.widths[1]
            job.dim = layer.head
            job.fresh = tokens
            job.half = dtype == torch.bfloat16
            job.scale = scale
            fields.layer = layer.address

    def place(self, number: int, tensors: Sequence[Tensor | None], size: int) -> int:
        """Set the entries of a layer; return how many each row's first token attends to, 0 for another layout.

        Args:
            number: of the layer.
            tensors: buffers of keys [B, H, N, D] or [B, N, D], of values, of token indices; for the former keys the
                mask of real entries, bool [B, H or 1, N], or None, for the latter each head's bias [B, H, N]; and of
                the logarithms of weights, or None.
            size: slots in use; there is room for the tokens.
        """
        keys, values, index, marks, weights = tensors[:5]
        assert keys is not None and values is not None and index is not None
        if not all(part is None or part.is_contiguous() for part in tensors[:5]):
            return 0
        job = self._jobs[number]
        fields = self._stored[number]
        heads = self._heads[number]
        *front, slots, dim = keys.shape
        if dim != self.layers[number].head or keys.dtype != self._dtype:
            return 0
        if front == [self.batch, heads]:
            job.row = heads * slots
            job.head = slots
            job.newest = 1
            fields.stride = fields.written = 1
        elif front == [self.batch] and marks is not None and not slots % self._lanes:
            job.row = slots
            job.head = job.newest = 0
            fields.stride = heads
            fields.written = self._lanes
        else:
            return 0
        fields.few = self._few[number]
        job.seen = None
        if marks is not None:
            marked = marks.shape[1]
            if marked not in (1, heads):
                return 0
            job.seen = marks.data_ptr()
            job.item = marks.element_size()
            job.seen_row = marked * slots
            job.seen_head = slots if marked > 1 else 0
        job.weights = None if weights is None else weights.data_ptr()
        job.keys = keys.data_ptr()
        job.values = values.data_ptr()
        fields.index = index.data_ptr()
        job.size = size
        return (size + fields.stride) * (heads if job.newest else 1)


def through_layers(
    x: Tensor, cosine: Tensor, sine: Tensor, caches: Sequence[TokenEntries], indices: Sequence[int]
) -> Tensor:
    """Return the last layer's output for tokens whose entries are stored in all layers.

    Args:
        x: [B, L, C], the first layer's input, contiguous: the tokens of all caches, in order.
        cosine: [B or 1, L, D], contiguous, of the dtype of `x`.
        sine: the same.
        caches: in order; all with the same layers.
        indices: token index of the first token of each row, for each cache.
    """
    first = caches[0]
    tokens = x.shape[0] * x.shape[1]
    scratch = x.new_empty(tokens * first.scratch)
    out = torch.empty_like(x)
    pairs = zip(caches, indices, strict=True)
    rows = (_RowsFields * len(caches))(*[_RowsFields(cache.address, index) for cache, index in pairs])
    tables = cosine.data_ptr(), sine.data_ptr(), scratch.data_ptr()
    angles = cosine.shape[0] * cosine.shape[1]
    sizes = len(caches), len(first.layers), tokens, x.shape[-1], first.wide, angles, x.dtype == torch.bfloat16
    few = prompt.few_address() if any(cache.uses_few for cache in caches) else None
    fields = _PassFields(*kernel_addresses(), few, addressof(rows), *tables, *sizes)
    if not _kernel()(byref(fields), x.data_ptr(), out.data_ptr(), torch.get_num_threads()):
        raise MemoryError("there is no memory for a copy of a layer's input")
    return out


@functools.cache
def _kernel() -> Callable[..., int]:
    return function("token", "through_layers", *(c_void_p,) * 3, c_int64, returns=c_int64)

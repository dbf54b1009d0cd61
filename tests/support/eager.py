"""transformers' eager attention, as a reference in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface


@contextmanager
def exact_eager() -> Iterator[None]:
    """Let eager attention stay in float64, where it would take the softmax in float32.

    Entries are hidden by float64's least number, which is -inf in float32: a token of padding, which sees nothing,
    would become NaN, and so would whatever meets its values.
    """
    mask_before, softmax_before = ALL_MASK_ATTENTION_FUNCTIONS["eager"], functional.softmax

    def mask(*args: Any, **kwargs: Any) -> Any:
        found = mask_before(*args, **kwargs)
        return found if found is None else found.clamp(min=torch.finfo(torch.float32).min)

    def softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        exact = input.dtype == torch.float64 and dtype == torch.float32
        return softmax_before(input, dim, _stacklevel, None if exact else dtype)

    AttentionMaskInterface.register("eager", mask)
    functional.softmax = softmax
    try:
        yield
    finally:
        AttentionMaskInterface.register("eager", mask_before)
        functional.softmax = softmax_before

"""Plain transformers, timed: the prompt, then one loop with argmax.

Imports torch and transformers alone, since the interpreter of another library runs this file too (bench/peer.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

# As in hf/compat.py, which the other library's interpreter may not have.
_CACHE = (
    "cache" if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
)


@torch.no_grad()
def read_and_decode(
    model: Any,
    ids: Tensor,
    mask: Tensor | None,
    new_tokens: int,
    *,
    chunk: int | None = None,
    reading: contextlib.AbstractContextManager[Any] | None = None,
    first: Callable[[], None] | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """Prefill int64 [B, N] and generate `new_tokens` (at least 2) per row at transformers' best setting.

    mask: int64 [B, N], 0 for padding on the left, None without any. chunk: prompt tokens per pass, None for all.
    reading: entered during prefill, for a library that hooks the model. first: called at the first token.

    Returns rows, ttft_s, tpot_s (per token after the first), kv_bytes at the end and kv_read_bytes per generated token
    of all rows; and the tokens, int64 [B, new_tokens].
    """
    rows, length = ids.shape
    cache = DynamicCache(config=model.config)
    # Given on every pass, since a library that drops entries changes the positions that transformers would infer from
    # the cache.
    positions = torch.arange(length + new_tokens, device=ids.device).expand(rows, -1)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(rows, new_tokens)], 1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)

    def step(fed: Tensor, start: int) -> Tensor:
        end = start + fed.shape[1]
        seen = None if mask is None else mask[:, :end]
        out = model(fed, attention_mask=seen, position_ids=positions[:, start:end], logits_to_keep=1, **{_CACHE: cache})
        return out.logits[:, -1].argmax(-1, keepdim=True)

    wait(ids)
    began = time.perf_counter()
    with reading or contextlib.nullcontext():
        for start in range(0, length, chunk or length):
            token = step(ids[:, start : start + (chunk or length)], start)
    wait(ids)
    chosen = time.perf_counter()
    if first is not None:
        first()
    after_prompt = held_bytes(cache)
    tokens = [token]
    started = time.perf_counter()
    for at in range(length, length + new_tokens - 1):
        tokens.append(step(tokens[-1], at))
    wait(ids)
    tpot = (time.perf_counter() - started) / (new_tokens - 1)
    kv_bytes = held_bytes(cache)
    # From one entry more than after the prompt to those at the end.
    read = (after_prompt + kv_bytes) / 2 + (kv_bytes - after_prompt) / (2 * (new_tokens - 1))
    run = {"rows": rows, "ttft_s": chosen - began, "tpot_s": tpot, "kv_bytes": kv_bytes, "kv_read_bytes": round(read)}
    return run, torch.cat(tokens, 1)


def held_bytes(cache: Any) -> int:
    """Return the bytes of keys, values and states in transformers' cache layers."""
    total = 0
    for value in (value for layer in cache.layers for value in vars(layer).values()):
        # Recurrent layers have a dict of states.
        parts = value.values() if isinstance(value, dict) else [value]
        total += sum(part.nbytes for part in parts if isinstance(part, Tensor) and part.ndim > 1)
    return total


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)

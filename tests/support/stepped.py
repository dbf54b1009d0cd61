"""One layer of one row that decodes token by token under an evictor, without a model."""

from __future__ import annotations

import torch

from kvsieve.types import LayerContext, Step


def run(evictor, query, keys, prompt, count, values=None, steps=True):
    """Per head, the tokens that are stored after each eviction; lists of lists.

    Args:
        evictor: acts after the prompt and, with `steps`, after each further token.
        query: [Hq, N, D]. keys, values: [H, N, D].
        prompt: tokens of the prompt.
        count: entries that it may keep.
    """
    values = keys if values is None else values
    heads = [list(range(prompt)) for _ in keys]
    state, after = {}, []
    for end in range(prompt, query.shape[1] + 1 if steps else prompt + 1):
        new = prompt if end == prompt else 1
        if end > prompt:
            heads = [[*own, end - 1] for own in heads]
        ctx = _context(query[:, end - new : end], keys, values, heads, end, new, state)
        if evictor.when.observes:
            evictor.observe(ctx)
        selection = evictor.select(ctx, (count,))
        if selection is not None:
            real = selection.real()
            real = torch.ones_like(selection.indices) if real is None else real
            real = (real if real.ndim == 3 else real[:, None]).expand_as(selection.indices).bool()
            tokens = ctx.index.gather(2, selection.indices)
            heads = [tokens[0, head][real[0, head]].tolist() for head in range(len(heads))]
        after.append([list(own) for own in heads])
    return after


def _context(query, keys, values, heads, end, new, state):
    size = max(map(len, heads))
    index = torch.tensor([[-1] * (size - len(own)) + own for own in heads], dtype=torch.int32)[None]
    rows = index[0].long().clamp_min(0)
    at = torch.arange(len(heads))[:, None]
    phase = "prefill" if new > 1 or end == new else "decode"
    return LayerContext(
        layer_idx=0,
        num_layers=1,
        step=Step(end - new, new, phase, True, 0, 0, (end,), (end,)),
        scale=keys.shape[-1] ** -0.5,
        query=query[None],
        keys=keys[at, rows][None],
        values=values[at, rows][None],
        index=index,
        valid=None if bool((index >= 0).all()) else index >= 0,
        stored=(size,),
        state=state,
    )

"""What attention is given in transformers' own forward passes, without kvsieve."""

from __future__ import annotations

import contextlib

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@contextlib.contextmanager
def seen_by_attention(model):
    """A dict that holds, per layer, the (query, keys) of the last forward pass inside the block, all keys stored."""
    seen = {}

    def attend(module, query, key, value, mask, **kwargs):
        seen[module.layer_idx] = (query, key)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("spying", attend)
    AttentionMaskInterface.register("spying", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("spying")
    try:
        yield seen
    finally:
        model.set_attn_implementation(before)


def softmax_rows(query, keys, scale, visible):
    """[T, N] weights of query [T, D] over keys [N, D], in plain loops; visible(t, j) says which a query sees."""
    rows = []
    for t in range(len(query)):
        shown = [j for j in range(len(keys)) if visible(t, j)]
        weights = dict(zip(shown, (keys[shown] @ query[t] * scale).softmax(0).tolist(), strict=True)) if shown else {}
        rows.append([weights.get(j, 0.0) for j in range(len(keys))])
    return rows


def note_largest(out, seen, n, span, visible):
    """Raise scores [layers][H][n] of a span to the largest weights that the queries after `n` tokens give it."""
    for layer, (query, keys) in seen.items():
        heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
        mine = out.setdefault(layer, [[0.0] * n for _ in range(heads)])
        for head in range(query.shape[1]):
            rows = softmax_rows(query[0, head, n:], keys[0, head // groups], query.shape[-1] ** -0.5, visible)
            for j in span:
                mine[head // groups][j] = max(mine[head // groups][j], *(row[j] for row in rows))

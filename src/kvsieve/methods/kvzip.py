"""KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv 2505.23416).

The model is made to repeat its context: after prefill, every chunk of it is fed once more, after a request to repeat it
and, from the second chunk, the last 8 tokens of the chunk before. An entry's score is the largest attention it gets
from any of the tokens fed and any query head of its group, in a softmax over the prefix, the chunk and the tokens fed.
Fed tokens are not stored. The best entries of all layers and heads together stay, so that heads keep different numbers,
or the best of each head (`uniform=True`). The choice does not depend on the text after the prompt, so it serves any
question.

Chunks cover the whole conversation: on a later turn it is repeated again; dropped entries stay dropped. Repeating costs
as much as the prefill, or up to twice that.

Differences from the reference: the prefix is protected at any length; the total is exact, ties go to the lower layer,
head and slot; each row of a batch has chunks of its own tokens; the end of a prompt is repeated with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsieve.lazy import Tensor, torch
from kvsieve.methods.reconstruction import Fed, ReconstructionEvictor
from kvsieve.methods.repeating import RepeatingEvictor
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Branch, ProbePasses

# Tokens of the chunk before, fed before a chunk.
_LEAD = 8


@register_method("kvzip", title="KVzip", paper="arXiv 2505.23416", phase="end of prompt", budget="30%")
@dataclass(frozen=True, kw_only=True)
class KVzip(ReconstructionEvictor, RepeatingEvictor, heads="all", ragged=True, takes_quotas=True, query_aware=False):
    """Keep the entries the model needs to repeat its context, for any question.

    budget: entries per layer and KV head, including the prefix, on average over layers and heads unless ``uniform``.
    prefix: first tokens that always stay, such as a system prompt, at least 1. chunk_length: tokens repeated at once.
    uniform: the same number in every head. repeat_ids, go_on_ids: token ids of the requests to repeat, before the first
    chunk and before later ones, each followed by the last 8 tokens of the chunk before; answer_ids: the chat template's
    header of an answer; () for nothing. None is filled in by `repeat_requests` with a tokenizer (``attach(model, plan,
    tokenizer=tokenizer)``, a chat, the command line, evaluations), which a prompt requires. skip_layers: layers that
    keep all, not counted.
    """

    go_on_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        ReconstructionEvictor.__post_init__(self)
        RepeatingEvictor.__post_init__(self)

    @property
    def probe_tokens(self) -> int:
        longest = max(len(self.repeat_ids or ()), len(self.go_on_ids or ()) + _LEAD)
        return longest + len(self.answer_ids or ()) + self.chunk_length

    @property
    def requests(self) -> dict[str, tuple[int, ...] | None]:
        return {**super().requests, "go_on_ids": self.go_on_ids}

    @property
    def probe_identity(self) -> KVzip:
        # Scores cover the whole prompt, however much of it stays.
        return replace(self, budget=Budget(ratio=1.0), uniform=False)

    def prepare(self, passes: ProbePasses, numbers: Tensor) -> tuple[Branch, Fed]:
        whole = passes.branch()
        whole.read_rest()
        return whole, lambda row, tokens, start: self.fed(tokens, start)

    def fed(self, tokens: Tensor, start: int) -> Tensor:
        """Return the tokens that repeat the chunk from `start` of a row's `tokens` [n], without padding, or none."""
        chunk = tokens[start : start + self.chunk_length]
        if not len(chunk):
            return chunk
        request = (self.go_on_ids if start else self.repeat_ids) or ()
        before = [*request, *tokens[max(0, start - _LEAD) : start].tolist(), *(self.answer_ids or ())]
        return torch.cat([chunk.new_tensor(before), chunk])

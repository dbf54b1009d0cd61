"""The result of a generate call."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.detokenize import text_of
from kvsieve.errors import CacheStateError, InputError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.kept import kept_of
from kvsieve.hf.kept_tokens.kept import Kept
from kvsieve.report.display import html_table


@dataclass(repr=False)
class GenerateResult:
    """The result of one generate call.

    Attributes:
        sequences: int64 [B, N + new].
        stats: statistics of the call.
        cache: ready for the next turn.
        output: result of ``model.generate``.
        token_s: seconds of every token after the first, in order, capturing included; see stats.tpot_s.
        seen: columns that the cache had seen then.
        tokenizer: of the model, or None.
        prompt_columns: columns of the prompt in `sequences`.
        ends: ids of end tokens.
    """

    sequences: Tensor
    stats: Stats
    cache: SieveCache
    output: Any
    token_s: list[float]
    seen: int
    tokenizer: Any = None
    prompt_columns: int = 0
    ends: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """Answer of the first row; see `texts`."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """Answers of all rows, without special tokens. Raises InputError without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("result.text needs the tokenizer: kvsieve.attach(model, plan, tokenizer=tokenizer)")
        rows = self.sequences[:, self.prompt_columns :].tolist()
        cut = ([*itertools.takewhile(lambda token: token not in self.ends, row)] for row in rows)
        return [text_of(self.tokenizer, row).strip() for row in cut]

    @functools.cached_property
    def kept(self) -> Kept:
        """Tokens that the cache still stores, of the first row; `kept_in` is for another.

        Copied from the cache on first access: access it before the cache continues.

        Raises:
            CacheStateError: the cache has continued since, or its rows are beams.
        """
        return self.kept_in(0)

    def kept_in(self, row: int) -> Kept:
        """Return the tokens that the cache still stores of a row of the batch; see `kept`."""
        if self.cache.num_seen != self.seen:
            raise CacheStateError(
                "the cache has gone on since this answer and holds other tokens now: ask for result.kept before the "
                "next turn, or look at the cache as it is with sieve.kept(cache, input_ids)"
            )
        return kept_of(self.cache, self.sequences, row, self.tokenizer)

    def __repr__(self) -> str:
        return f"<GenerateResult {list(self.sequences.shape)} tokens, {self.stats}>"

    def _repr_html_(self) -> str:
        shape = " x ".join(map(str, self.sequences.shape))
        return html_table(f"{self.stats.method}: sequences of {shape} tokens", self.stats.describe())

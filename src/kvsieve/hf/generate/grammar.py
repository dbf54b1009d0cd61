"""Grammars compiled for a tokenizer by llguidance, and matchers: the tokens that an answer may go on with."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast

from kvsieve.detokenize import token_bytes
from kvsieve.errors import InputError, UnsupportedOptionError, short
from kvsieve.hf.generate.config import end_tokens
from kvsieve.planning.grammars import Grammar, fault, library, parsed

# Tokenizers, and grammars of each, that stay compiled.
_TOKENIZERS = 4
_GRAMMARS = 32


class Vocabulary:
    """A tokenizer in llguidance's form, and its grammars compiled last.

    Attributes:
        size: tokens of the tokenizer; the token of this number is llguidance's own, for the end.
        tokenizer: of llguidance.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.size = max(tokenizer.get_vocab().values()) + 1
        self.tokenizer = _converted(tokenizer, self.size)
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, grammar: Grammar, check: Callable[[str], None] | None = None) -> CompiledGrammar:
        """Return a compiled grammar; see `compiled`."""
        with self._lock:
            found = self._compiled.pop(grammar, None)
        if found is None:
            if check is not None:
                check(grammar.text)
            found = CompiledGrammar(self, grammar)
        with self._lock:
            self._compiled[grammar] = found
            if len(self._compiled) > _GRAMMARS:
                self._compiled.popitem(last=False)
        return found


class _ByteTokens:
    """A tokenizer for llguidance's wrapper, by the bytes of its tokens."""

    # llguidance appends a token for the end.
    eos_token_id = None
    bos_token_id = None

    def __init__(self, tokenizer: Any, size: int) -> None:
        bytes_of = token_bytes(tokenizer)
        self.tokens = [bytes_of(token) for token in range(size)]
        self.special_token_ids = [token for token, word in tokenizer.added_tokens_decoder.items() if word.special]
        self.converted: Any = None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("a text is split, not bytes")
        tokens: list[int] = self.converted.greedy_tokenize(text)
        return tokens


def _converted(tokenizer: Any, size: int) -> Any:
    """Return a tokenizer of `size` tokens in llguidance's form."""
    package = library()
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(tokenizer, n_vocab=size + 1, eos_token=size)
        except ValueError:  # of a decoder that it does not know
            pass
    tokens = _ByteTokens(tokenizer, size)
    tokens.converted = package.LLTokenizer(package.TokenizerWrapper(tokens))
    return tokens.converted


class CompiledGrammar:
    """A grammar compiled for a tokenizer. vocabulary: of the tokenizer."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self.vocabulary = vocabulary
        self._first = parsed(grammar.text, vocabulary.tokenizer)
        if error := fault(self._first):
            raise InputError(f"the grammar cannot be compiled: {short(error, 400)}")
        self._lock = threading.Lock()

    def matcher(self, ends: Collection[int]) -> Matcher:
        """Return the matcher of a new answer. ends: tokens that may end it, where the grammar is complete."""
        with self._lock:
            return Matcher(self.vocabulary, self._first.deep_copy(), ends)


@functools.lru_cache(_TOKENIZERS)
def _vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def compiled(grammar: Grammar, tokenizer: Any, check: Callable[[str], None] | None = None) -> CompiledGrammar:
    """Return a grammar compiled for a tokenizer; the newest ones stay compiled.

    Args:
        grammar: the source.
        tokenizer: of the model.
        check: called with the text of a grammar that is not compiled yet.

    Raises InputError.
    """
    return _vocabulary(tokenizer).compiled(grammar, check)


class Matcher:
    """The place of one answer in its grammar. Made by CompiledGrammar.matcher."""

    def __init__(self, vocabulary: Vocabulary, state: Any, ends: Collection[int]) -> None:
        self._size = vocabulary.size
        self._state = state
        self._ends = sorted(ends)
        self._bits = np.zeros((vocabulary.tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._known: np.ndarray | None = None
        self._ended = False

    @property
    def complete(self) -> bool:
        """True if nothing but the end may follow. Raises InputError where the grammar is too complex."""
        return self._ended or not self._allowed()[: self._size].any()

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores [V] with -inf for tokens that may not follow; unchanged ones behind the end.

        If rules before have given -inf to all that may follow, these are alike.

        Raises InputError where the grammar is too complex.
        """
        if self._ended:
            return scores
        known = self._allowed()
        size = min(self._size, len(scores))
        allowed = torch.zeros(len(scores), dtype=torch.bool)
        allowed[:size] = torch.from_numpy(known[:size])
        if known[self._size]:
            allowed[[token for token in self._ends if token < len(scores)]] = True
        hidden = ~allowed.to(scores.device)
        restricted = scores.masked_fill(hidden, -torch.inf)
        if bool(restricted.max() == -torch.inf):
            return torch.zeros_like(scores).masked_fill(hidden, -torch.inf)
        return restricted

    def take(self, token: int) -> bool:
        """Append a token to the answer; return False, and change nothing, for one that may not follow."""
        if self._ended:
            return False
        if token in self._ends and self._allowed()[self._size]:
            self._ended = True
            return True
        if token >= self._size or self._state.try_consume_tokens([token]) == 0:
            return False
        self._known = None
        self._ended = token in self._ends
        return True

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens may follow, in order; those from an end token on are not counted."""
        plain = [*itertools.takewhile(lambda token: token < self._size and token not in self._ends, tokens)]
        return int(self._state.validate_tokens(plain)) if plain and not self._ended else 0

    def _allowed(self) -> np.ndarray:
        """Return which tokens the grammar allows, bool [more than size]; that of number size is the end."""
        if self._known is None:
            self._state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            if error := fault(self._state):
                raise InputError(
                    "the answer's grammar is too complex at this place, or allows no token of the model: "
                    f"{short(error, 300)}; give a simpler one"
                )
            self._known = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(bool)
        return self._known


class GrammarProcessor(LogitsProcessor):
    """Restricts the next tokens of answers to their grammars. matchers: one per row."""

    def __init__(self, matchers: Sequence[Matcher] = ()) -> None:
        self.matchers = list(matchers)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.stack([matcher.restrict(row) for matcher, row in zip(self.matchers, scores, strict=True)])


class FollowingProcessor(GrammarProcessor):
    """Restricts the answers of one generate call, whose tokens it takes from the ids of each step.

    Args:
        grammar: of every row.
        ends: tokens that end an answer.
    """

    def __init__(self, grammar: CompiledGrammar, ends: Collection[int]) -> None:
        super().__init__()
        self._grammar = grammar
        self._ends = ends
        self._prompt = 0
        self._taken = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.matchers:
            self.matchers = [self._grammar.matcher(self._ends) for _ in input_ids]
            self._prompt = input_ids.shape[1]
        self.follow(input_ids[:, self._prompt :])
        return super().__call__(input_ids, scores)

    def follow(self, answers: Tensor) -> None:
        """Take the newest tokens of the answers int64 [B, new]; padding of rows that have ended changes nothing."""
        for matcher, tokens in zip(self.matchers, answers[:, self._taken :].tolist(), strict=True):
            for token in tokens:
                matcher.take(token)
        self._taken = answers.shape[1]


def following(grammar: Any, tokenizer: Any, config: GenerationConfig) -> FollowingProcessor | None:
    """Return the processor for a caller's grammar=, or None for none.

    Args:
        grammar: a Grammar, or None.
        tokenizer: of the model, or None.
        config: in effect.

    Raises:
        InputError: it is no grammar or cannot be compiled, or there is no tokenizer or no end token.
        UnsupportedOptionError: beams.
    """
    if grammar is None:
        return None
    if not isinstance(grammar, Grammar):
        raise InputError(
            f"grammar= takes a kvsieve.Grammar, such as kvsieve.Grammar.json_schema(schema); got {short(grammar)}"
        )
    if tokenizer is None:
        raise InputError("grammar= needs the tokenizer: kvsieve.attach(model, plan, tokenizer=tokenizer)")
    if (config.num_beams or 1) > 1:
        raise UnsupportedOptionError(
            "grammar= does not go with generate(num_beams=...): beams change places after every token; leave one out"
        )
    ends = end_tokens(config)
    if not ends:
        raise InputError("grammar= needs an end token, with which a complete answer ends: pass eos_token_id=")
    return FollowingProcessor(compiled(grammar, tokenizer), ends)

"""Sampling rules, chosen tokens, and the pieces that an answer is sent in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Rules of sampling.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: probability mass to sample from; None for the checkpoint's generation_config, also for the next three.
        top_k: most tokens to sample from, 0 for all.
        min_p: least probability, relative to the likeliest token's.
        repetition_penalty: divides logits of tokens that occurred, including the prompt's.
        presence_penalty: subtracted from logits of tokens in the answer.
        frequency_penalty: the same, per occurrence.
        bias: added to logits, by token id.
        seed: of the draws; None for a random one.
        logprobs: number of likeliest tokens to return with each token; None for no log-probabilities.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLikelihood:
    """A token, and its log-probability before sampling rules."""

    id: int
    logprob: float


@dataclass(frozen=True)
class ChosenToken:
    """A sampled token.

    Attributes:
        own: the token.
        top: the likeliest tokens.
        offset: characters of the answer before it.
    """

    own: TokenLikelihood
    top: tuple[TokenLikelihood, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class PromptProgress:
    """Progress of a prefill.

    Attributes:
        done: tokens with KV, including those from the store.
        cached: tokens from the store.
        total: tokens of the prompt.
        seconds: since the prefill began.
    """

    done: int
    cached: int
    total: int
    seconds: float


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer.

    Attributes:
        answer: number of the answer, 0 to n - 1.
        text: may be empty, if a character is incomplete.
        tokens: chosen since the last piece, if log-probabilities were requested.
        finish: "stop", "length", or None while the answer is in progress.
        progress: of the prefill, in parts before the first token only.
        stop: the text of a stop that ended the answer; None if none did.
    """

    answer: int
    text: str
    tokens: tuple[ChosenToken, ...] = ()
    finish: str | None = None
    progress: PromptProgress | None = None
    stop: str | None = None

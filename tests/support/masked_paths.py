"""How each path of `paths.PATHS` takes prompts under a mask, or why it takes none: path x kind, in MASKED.

A carrier takes the question and others that are read beside it, and returns the question's answer. The question's
words, and theirs, include the pad token.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kvsieve
from kvsieve.hf.compat import CACHE
from paths import PATHS, Ask, answer, chat_reply, serving, streamed, words
from small import fill
from tiny_models import build

PAD = "w5"
KINDS = ("left padding", "holes", "lengths", "ended early")
Carrier = Callable[..., str]
Generate = Callable[..., tuple[Tensor, Any]]


def asks() -> tuple[Ask, Ask, Ask]:
    """A question, a longer and a shorter one to a model whose pad token is a word of each."""
    model, texts = fill(build("llama", dtype=torch.float64)), [words(40, seed=4), words(61, seed=7), words(18, seed=8)]
    first = Ask(model, f"{PAD} {texts[0]} {PAD} {PAD}", method="snapkv:window=4:kernel=3:paper=true", budget=24)
    (pad,) = first.tokenizer.convert_tokens_to_ids([PAD])
    model.generation_config.pad_token_id = model.config.pad_token_id = pad
    # Plans of the evaluation differ in what they store.
    longer, shorter = (replace(first, text=f"{PAD} {text} {PAD}") for text in texts[1:])
    return first, replace(longer, budget=31), replace(shorter, budget=17)


def _pad(ask: Ask) -> int:
    return int(ask.model.generation_config.pad_token_id)


def _options(ask: Ask, *ends: int) -> dict[str, Any]:
    own = ask.options
    return {**own, "pad_token_id": _pad(ask), "eos_token_id": [*own["eos_token_id"], *ends]}


def _said(ask: Ask, tokens: Tensor) -> str:
    """The answer in what was generated for a row, whose padding is a word as well."""
    ends = ask.options["eos_token_id"]
    kept = next((tokens[:at] for at, token in enumerate(tokens.tolist()) if token in ends), tokens)
    return ask.tokenizer.decode(kept, skip_special_tokens=False).strip()


def _rows(pad: int, *prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts int64 [N] as rows, padded on the left, and their mask."""
    size = max(map(len, prompts))
    ids = torch.stack([torch.cat([one.new_full((size - len(one),), pad), one]) for one in prompts])
    return ids, torch.stack([(torch.arange(size) >= size - len(one)).long() for one in prompts])


def _sieve_generate(sieve: Any, ids: Tensor, mask: Tensor, cache: Any, **options: Any) -> tuple[Tensor, Any]:
    result = sieve.generate(ids, mask, cache=cache, **options)
    return result.sequences, result.cache


def _in_chunks(*call: Any, **options: Any) -> tuple[Tensor, Any]:
    return _sieve_generate(*call, chunk=16, **options)


def _model_generate(sieve: Any, ids: Tensor, mask: Tensor, cache: Any, **options: Any) -> tuple[Tensor, Any]:
    cache = sieve.new_cache() if cache is None else cache
    return sieve.model.generate(ids, attention_mask=mask, **{CACHE: cache}, **options), cache


def _begin(sieve: Any, ids: Tensor, mask: Tensor, cache: Any, **options: Any) -> tuple[Tensor, Any]:
    return _sieve_generate(sieve, ids, mask, sieve.begin(ids[:, :12], cache=cache), **options)


def _padded(generate: Generate) -> Carrier:
    def carry(ask: Ask, *others: Ask) -> str:
        ids = torch.cat([torch.full((1, 9), _pad(ask)), ask.ids], 1)
        mask = (torch.arange(ids.shape[1]) >= 9).long()[None]
        with kvsieve.attach(ask.model, ask.plan) as sieve:
            return _said(ask, generate(sieve, ids, mask, None, **_options(ask))[0][0, ids.shape[1] :])

    return carry


def _holed(generate: Generate) -> Carrier:
    """Hidden words at two places, one of them in the window of the last queries."""

    def carry(ask: Ask, *others: Ask) -> str:
        parts = ask.ids.split([20, ask.ids.shape[1] - 22, 2], 1)
        hidden = torch.tensor([[7, 8, _pad(ask), 9]])
        ids = torch.cat([parts[0], hidden, parts[1], hidden, parts[2]], 1)
        shown = [torch.full_like(part, part is not hidden) for part in (parts[0], hidden, parts[1], hidden, parts[2])]
        with kvsieve.attach(ask.model, ask.plan) as sieve:
            found = generate(sieve, ids, torch.cat(shown, 1), None, **_options(ask))[0]
        return _said(ask, found[0, ids.shape[1] :])

    return carry


def _beside(generate: Generate) -> Carrier:
    def carry(ask: Ask, *others: Ask) -> str:
        ids, mask = _rows(_pad(ask), *(each.ids[0] for each in (ask, *others)))
        with kvsieve.attach(ask.model, ask.plan) as sieve:
            return _said(ask, generate(sieve, ids, mask, None, **_options(ask))[0][0, ids.shape[1] :])

    return carry


def _continued(generate: Generate) -> Carrier:
    """The second answer of a row whose first one ended after three tokens, while others went on."""

    def carry(ask: Ask, *others: Ask) -> str:
        pad, rows = _pad(ask), (ask, *others)
        (end,) = ask.tokenizer.convert_tokens_to_ids([answer("generate", ask).split()[2]])
        ids, mask = _rows(pad, *(each.ids[0] for each in rows))
        later, shown = _rows(pad, *(each.ids[0, -6 - 5 * at :] for at, each in enumerate(rows)))
        with kvsieve.attach(ask.model, ask.plan) as sieve:
            seen, cache = generate(sieve, ids, mask, None, **_options(ask, end))
            made = seen[:, ids.shape[1] :]
            assert made.shape[1] == (ask.tokens if others else 3)
            assert made[0, 2] == end and (made[0, 3:] == pad).all()
            fed, mask = torch.cat([seen, later], 1), torch.cat([mask, torch.ones_like(made), shown], 1)
            return _said(ask, generate(sieve, fed, mask, cache, **_options(ask))[0][0, fed.shape[1] :])

    return carry


def _requests(reply: Callable[..., str], times: int = 1) -> Carrier:
    """Requests that a server answers at the same time."""

    def carry(ask: Ask, *others: Ask) -> str:
        with serving(ask) as url, ThreadPoolExecutor(1 + len(others)) as pool:
            for _ in range(times):
                first, *_ = pool.map(lambda each: reply(url, each), (ask, *others))
        return first

    return carry


def _sessions(turns: int) -> Carrier:
    """Sessions of one server at the same time; of two turns, the question's first answer is the shortest."""

    def carry(ask: Ask, *others: Ask) -> str:
        def talk(url: str, each: Ask) -> str:
            kv, messages, text = {"session": f"s{len(each.text)}"}, each.messages, ""
            for turn in range(turns):
                short = {"max_tokens": 3} if each is ask and turn + 1 < turns else {}
                text = chat_reply(url, each, messages=messages, kv=kv, **short)
                said = {"role": "assistant", "content": text}, {"role": "user", "content": f"{PAD} w7 w9 w11 w13"}
                messages = [*messages, *said]
            return text

        return _requests(talk)(ask, *others)

    return carry


NO_MASK = "takes text or tokens of one row, and no mask"
ONE_ROW = "answers one row"
NO_CONVERSATION = "continues no conversation"


def _library(generate: Generate) -> dict[str, Carrier | str]:
    makers = (_padded, _holed, _beside, _continued)
    return {kind: make(generate) for kind, make in zip(KINDS, makers, strict=True)}


def _texts(lengths: Carrier | str, ended: Carrier | str = NO_CONVERSATION) -> dict[str, Carrier | str]:
    """Kinds of a path that makes its masks itself."""
    return dict(zip(KINDS, (NO_MASK, NO_MASK, lengths, ended), strict=True))


MASKED: dict[str, dict[str, Carrier | str]] = {
    "generate": _library(_sieve_generate),
    "chunks": _library(_in_chunks),
    "model.generate": _library(_model_generate),
    "pipeline": _texts(PATHS["pipeline"]),
    "padded row": dict.fromkeys(KINDS, "is generate's row of a padded batch: see generate"),
    "begin": {**dict.fromkeys(KINDS, "begin reads one row without padding"), "holes": _holed(_begin)},
    "chat": _texts(ONE_ROW, ONE_ROW),
    "chat with a store": _texts(ONE_ROW, ONE_ROW),
    "evaluation": _texts(PATHS["evaluation"], "asks later questions without the answers before"),
    "lm-eval": _texts(PATHS["lm-eval"]),
    "run": _texts(ONE_ROW),
    "run --prompts-file": _texts(PATHS["run --prompts-file"]),
    "chat command": _texts(ONE_ROW, ONE_ROW),
    "completions": _texts(PATHS["completions"]),
    "chat completions": _texts(_requests(chat_reply)),
    "chat completions, read before": _texts(_requests(chat_reply, times=2)),
    "session": _texts(_sessions(1), _sessions(2)),
    "stream": _texts(_requests(streamed)),
}
# A new path chooses for every kind.
assert MASKED.keys() == PATHS.keys()
assert all(tuple(kinds) == KINDS for kinds in MASKED.values())
CARRIED = [(path, kind) for path, kinds in MASKED.items() for kind, how in kinds.items() if callable(how)]

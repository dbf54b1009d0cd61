"""Decoding with drafts: transformers' own steps per token, over passes that verify several."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from kvsieve.errors import InputError, UnsupportedOptionError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE
from kvsieve.hf.drafts.drafter import DraftCounts, RowDrafts
from kvsieve.hf.drafts.opened import open_drafts
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.generate.grammar import FollowingProcessor
from kvsieve.hf.prompt.reread import tokens_before_border
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.drafts import MOST, Draft, as_draft

_TENTATIVE = PassRequest(tentative=True)


class DraftedAnswer:
    """Decodes an answer for ``model.generate(custom_generate=...)``, with drafts of its next tokens.

    Every token is chosen from the model's own logits, as without drafts and with the same draws; a pass also verifies
    tokens that are likely to follow. Rows of a batch advance together: by as many tokens as are right in all of them.

    Attributes:
        counts: of all rows.
        notes: why drafts stopped, if they did.
    """

    def __init__(
        self,
        model: AttachedModel,
        cache: SieveCache,
        draft: Draft,
        rows: Sequence[Sequence[int]],
        again: Callable[[Tensor, Tensor | None], SieveCache | None] | None = None,
        grammar: FollowingProcessor | None = None,
    ) -> None:
        """Prepare an answer.

        Args:
            model: the attached model.
            cache: of the conversations.
            draft: the source of drafts.
            rows: tokens of each row as they were given, without padding.
            again: prefills everything again where the rotary tables change; None if they do not.
            grammar: that the answers match; None for none.
        """
        self.counts = DraftCounts()
        self.notes: list[str] = []
        self._model = model
        self._cache = cache
        self._draft = draft
        self._given = rows
        self._again = again
        self._grammar = grammar
        self._streamer: Any = None
        self._rows: list[RowDrafts] = []

    def joined(
        self, criteria: list[Any], options: dict[str, Any], config: GenerationConfig
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return stopping criteria and options of generate, for it to decode by this.

        Args:
            criteria: of the caller.
            options: of generate.
            config: in effect for them.
        """
        # generate gives its streamer and stop strings to its own loops only.
        self._streamer = options.get("streamer")
        tokenizer = options.get("tokenizer")
        if config.stop_strings is not None and tokenizer is not None and options.get("stop_strings", True) is not None:
            criteria = [StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings), *criteria]
            options = {**options, "stop_strings": None}
        return criteria, {**options, "custom_generate": self}

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> Any:
        """Return what ``model.generate`` returns; see transformers' custom_generate."""
        steps = TokenSteps(input_ids, logits_processor, stopping_criteria, generation_config, self._streamer)
        mask = arguments.get("attention_mask")
        mask = None if mask is None or bool(mask.all()) else mask
        steps.take(self._first(input_ids, mask), [[]] * len(input_ids))
        with self._opened(steps.ids[:, -1].tolist()):
            while not steps.ended:
                going = steps.going
                before = steps.ids.shape[1]
                logits, drafts, transaction = self._pass(steps, mask, input_ids.shape[1])
                try:
                    steps.take(logits, drafts)
                finally:
                    count = steps.ids.shape[1] - before
                    if transaction is not None:
                        # The last token, and the drafts that were right; the newest token is not fed yet.
                        transaction.accept(count)
                for row in itertools.compress(range(len(going)), going):
                    self._rows[row].took(steps.ids[row, -count:].tolist())
        return steps.output(self._cache)

    @property
    def _is_recorded(self) -> bool:
        """True if passes over several tokens are recorded: their layers do nothing but append."""
        plan = self._model.plan
        acts = plan.codec is not None or plan.when.steps is not None
        return self._model.engine.records and plan.read is None and not (acts or self._cache.has_state)

    @contextlib.contextmanager
    def _opened(self, first: list[int]) -> Iterator[None]:
        """Open the drafts of rows with these first tokens, and add up their counts at the end."""
        copies = len(first) // len(self._given)
        given = [[*row, first[at * copies + copy]] for at, row in enumerate(self._given) for copy in range(copies)]
        self._rows = open_drafts(self._draft, self._model, self._cache, given)
        if self._grammar is not None:
            for drafts, matcher in zip(self._rows, self._grammar.matchers, strict=True):
                drafts.fits = matcher.allowed
        try:
            yield
        finally:
            for drafts in self._rows:
                drafts.close()
                self.counts.add(drafts.counts)
                if drafts.note is not None and drafts.note not in self.notes:
                    self.notes.append(drafts.note)

    def _first(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Run the pass over the prompt's rest; logits [B, 1, V]."""
        found = self._model.feed(self._cache, ids[:, self._cache.num_seen :], mask, logits=1).logits
        assert found is not None
        return found

    def _pass(self, steps: TokenSteps, mask: Tensor | None, prompt: int) -> tuple[Tensor, list[list[int]], Any]:
        """Feed the last tokens and drafts; return logits [B, 1 + k, V], the drafts per row, and the transaction.

        Args:
            steps: the answer so far.
            mask: of the prompt, None without padding.
            prompt: its columns.
        """
        ids = steps.ids
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - prompt)], 1)
        ahead = tokens_before_border(self._model, self._cache, 1 + self._draft.tokens)
        if not ahead:
            # generate would read everything again.
            assert self._again is not None
            self._again(ids, mask)
            return self._first(ids, mask), [[]] * len(ids), None
        if self._grammar is not None:
            self._grammar.follow(ids[:, prompt:])
        most = min(ahead - 1, steps.left - 1)
        drafts = [row.next(most) if going else [] for row, going in zip(self._rows, steps.going, strict=True)]
        size = max(map(len, drafts))
        if not size:
            found = self._model.feed(self._cache, ids[:, -1:], mask, logits=1).logits
            assert found is not None
            return found, drafts, None
        if self._is_recorded:
            # Passes of equal size share one recording.
            size = min(self._draft.tokens, ahead - 1)
            self._model.engine.expected.add(1 + size)
        # Rows with fewer drafts are fed any token; it is never accepted.
        last = ids[:, -1].tolist()
        fed = [row + [last[at]] * (size - len(row)) for at, row in enumerate(drafts)]
        tokens = torch.cat([ids[:, -1:], torch.tensor(fed, device=ids.device)], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(ids), size)], 1)
        result = self._model.feed(self._cache, tokens, mask, _TENTATIVE, logits=1 + size)
        assert result.logits is not None
        return result.logits, drafts, result.transaction


class TokenSteps:
    """The tokens so far, and the steps of transformers' sampling for each of them.

    Attributes:
        ids: int64 [B, N + new].
        going: True for rows that have not ended.
    """

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> None:
        self.ids = ids
        self.going = [True] * len(ids)
        self._unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        self._processors = processors
        self._criteria = criteria
        self._config = config
        self._streamer = streamer
        self._pads = any(isinstance(criterion, EosTokenCriteria) for criterion in criteria)
        asked = bool(config.return_dict_in_generate)
        self._scores: tuple[Tensor, ...] | None = () if asked and config.output_scores else None
        self._logits: tuple[Tensor, ...] | None = () if asked and config.output_logits else None
        # Greedy, without processors and recorded scores: all tokens of a pass are chosen at once.
        self._plain = not (processors or config.do_sample or self._scores is not None or self._logits is not None)
        # Tokens that end a row, where nothing else but the length ends it.
        known = all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in criteria)
        ends = (criterion for criterion in criteria if isinstance(criterion, EosTokenCriteria))
        self._ends = {token for end in ends for token in end.eos_token_id.tolist()} if known else None

    @property
    def ended(self) -> bool:
        return not any(self.going)

    @property
    def left(self) -> int:
        """Tokens until the longest length."""
        longest = self._criteria.max_length
        return 2**31 if longest is None else int(longest) - self.ids.shape[1]

    def take(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> None:
        """Choose tokens by logits [B, 1 + k, V] while drafts are right in every row."""
        largest = _largest(logits).to(self.ids.device) if self._plain else None
        if largest is not None and self._ends is not None:
            self._add_all(largest, drafts, self._ends)
            return
        for at in range(logits.shape[1]):
            chosen = self._add(self._choice(logits[:, at]) if largest is None else largest[:, at])
            if self.ended or not self._right(chosen, drafts, at):
                break

    def _right(self, tokens: Sequence[int], drafts: Sequence[Sequence[int]], at: int) -> bool:
        """Return True if the rows that go on have drafted these tokens as their next, after `at` others."""
        rows = zip(drafts, self.going, tokens, strict=True)
        return all(not going or (at < len(row) and row[at] == token) for row, going, token in rows)

    def _add_all(self, largest: Tensor, drafts: Sequence[Sequence[int]], ends: set[int]) -> None:
        """Add all tokens of a pass, the greatest of each place [B, 1 + k], until one is another than drafted."""
        added: list[list[int]] = []
        try:
            for at, column in enumerate(largest.T.tolist()):
                rows = [*zip(self.going, column, strict=True)]
                added.append([token if going else self._pad(token) for going, token in rows])
                if self._streamer is not None:
                    self._streamer.put(torch.tensor(added[-1]))
                goes_on = len(added) < self.left
                self.going = [going and goes_on and token not in ends for going, token in rows]
                if self.ended or not self._right(added[-1], drafts, at):
                    break
        finally:
            if added:
                self.ids = torch.cat([self.ids, torch.tensor(added, device=self.ids.device).T], 1)
            self._unfinished = torch.tensor(self.going, device=self.ids.device)

    def _pad(self, token: int) -> int:
        """Return what a row that has ended gets instead of a token."""
        pad: Any = self._config._pad_token_tensor
        return int(pad) if self._pads else token

    def _choice(self, logits: Tensor) -> Tensor:
        """Choose the next token of every row by logits [B, V]: [B]."""
        raw = logits.to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self._processors(self.ids, raw)  # type: ignore[arg-type]
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (raw,)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0] if self._config.do_sample else scores.argmax(-1)

    def _add(self, tokens: Tensor) -> list[int]:
        """Add the next token of every row, or padding to rows that have ended, and return them."""
        if self._pads:
            pad: Any = self._config._pad_token_tensor
            tokens = torch.where(self._unfinished, tokens, pad.to(tokens.device))
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        self._unfinished &= ~self._criteria(self.ids, self._scores)
        self.going = self._unfinished.tolist()
        return tokens.tolist()

    def output(self, cache: SieveCache) -> Any:
        """Return the result of generate."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        parts: dict[str, Any] = {"sequences": self.ids, "scores": self._scores, "logits": self._logits, CACHE: cache}
        return GenerateDecoderOnlyOutput(**parts)


def _largest(logits: Tensor) -> Tensor:
    """Return the token of the greatest of logits [..., V], of equal ones the first: int64 [...]."""
    # numpy takes a tenth of torch's time on a CPU.
    return torch.from_numpy(logits.detach().float().numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)


def true_rows(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of ids int64 [B, N], without the padding that a mask [B, N] hides."""
    if mask is None or mask.shape != ids.shape:
        return ids.tolist()
    return [row[real].tolist() for row, real in zip(ids, mask.bool().to(ids.device), strict=True)]


def taken_draft(model: Any, draft: Any, options: Mapping[str, Any]) -> tuple[Draft | None, dict[str, Any]]:
    """Return the draft that a call asks for, and its options without transformers' own ways of saying so.

    Args:
        model: of transformers.
        draft: the caller's draft=, see `as_draft`; None for none.
        options: of generate; ``prompt_lookup_num_tokens`` and ``assistant_model`` ask for drafts as well.

    Raises:
        PlanError: no such draft.
        UnsupportedOptionError: two of them, or options that drafts do not go with.
    """
    options = dict(options)
    found = as_draft(draft)
    # One of another kind is refused with the other options.
    says = [options.get("generation_config"), model.generation_config]
    configured = [part.prompt_lookup_num_tokens for part in says if isinstance(part, GenerationConfig)]
    assistant = options.pop("assistant_model", None)
    # The call overrides a configuration.
    by_default = configured if draft is None and assistant is None else ()
    default = next((tokens for tokens in by_default if tokens is not None), None)
    lookup = options.pop("prompt_lookup_num_tokens", default)
    tokenizer = options.pop("assistant_tokenizer", None)
    asked = {"draft": draft, "prompt_lookup_num_tokens": lookup, "assistant_model": assistant}
    several = [name for name, value in asked.items() if value is not None]
    if len(several) > 1:
        raise UnsupportedOptionError(f"{' and '.join(several)} both ask for drafts: leave one of them out")
    if any(tokens is not None for tokens in configured):
        options["prompt_lookup_num_tokens"] = None
    if lookup is not None:
        if type(lookup) is not int or lookup < 1:
            raise InputError(f"prompt_lookup_num_tokens is a number of tokens, at least 1, got {short(lookup)}")
        found = Draft("lookup", tokens=min(lookup, MOST))
    elif assistant is not None:
        found = as_draft(assistant if tokenizer is None else (assistant, tokenizer))
    return found, options


def check_drafted(config: GenerationConfig, options: Mapping[str, Any]) -> None:
    """Raise UnsupportedOptionError for options of generate that drafts do not go with; config: in effect for them."""
    refused = {
        "num_beams": ((config.num_beams or 1) > 1, "beams change places after every token"),
        "penalty_alpha": (config.penalty_alpha is not None, "contrastive search has passes of its own"),
        "output_hidden_states": (bool(config.output_hidden_states), "passes over several tokens have other ones"),
        "guidance_scale": (config.guidance_scale not in (None, 1), "it runs the model on a second prompt"),
        "synced_gpus": (bool(options.get("synced_gpus")), "processes would run different numbers of passes"),
        "inputs_embeds": (options.get("inputs_embeds") is not None, "there are no tokens to draft from"),
    }
    for name, value in options.items():
        if isinstance(value, Tensor) and name not in ("inputs", "input_ids", "attention_mask"):
            refused[name] = True, "passes over drafts do not hand it on"
    for name, (asked, reason) in refused.items():
        if asked:
            raise UnsupportedOptionError(
                f"draft= does not go with generate({name}=...): {reason}; leave one of them out"
            )

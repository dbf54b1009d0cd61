"""Samples under many plans, with shared prefill where results do not change, and batched decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.answer import Answer
from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.decoding.loop import Rows, step
from kvsieve.decoding.sampling import Sampler, processors_for
from kvsieve.detokenize import Detokenizer
from kvsieve.errors import InputError
from kvsieve.hf.attach import attach
from kvsieve.hf.cache.batching import can_stack, stack
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.drafts.opened import check_draft
from kvsieve.hf.generate.acted import what_ran
from kvsieve.hf.generate.config import check_single_answer
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.prompt.reread import tokens_before_border
from kvsieve.lab.eval.outcome import Outcome, compared_places, mean
from kvsieve.lab.eval.own import Methods, TaskOrRows, compared_rows
from kvsieve.lab.eval.reading import DocumentReader, ReadState
from kvsieve.lab.eval.rows import Row
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.models.quantized import weight_bytes
from kvsieve.planning.drafts import as_draft
from kvsieve.planning.plans import Plan
from kvsieve.shared.prompt import after_prompt, answer_logits, next_logits, read_alone


class Evaluator:
    """Run tasks and single samples on one model, greedily, under its generation_config.

    Your own task:

        rows = [{"context": text, "question": "Who wrote it?", "answer": "Ada"}, ...]
        evaluator = kvsieve.Evaluator(model, tokenizer)
        table = evaluator.compare(rows, ["snapkv:budget=20%", Mine(budget="20%")], score="contains")
        pandas.DataFrame(table).groupby("label").score.mean()

    examples/compare_methods.py is the whole program.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        batch: most answers decoded together.
        chunk: prompt tokens per forward pass; None for all at once.
        draft: source of drafts, which change no answer: "lookup", or as in ``Sieve.generate``. Default: none.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, batch: int = 8, chunk: int | None = None, draft: Any = None
    ) -> None:
        self.model = model
        self.draft = as_draft(draft)
        # A reader's view drafts on the cache of one answer.
        self.batch = batch if self.draft is None or self.draft.view is None else 1
        self.chunk = chunk
        self.documents = DocumentReader(model, chunk)
        self._weights = weight_bytes(model)
        self.prompter = Prompter(tokenizer, model.generation_config.eos_token_id)

    def compare(
        self,
        task: TaskOrRows,
        methods: Methods,
        *,
        score: str | Callable[..., Any] = "contains",
        **options: Any,
    ) -> list[Row]:
        """Return a row per sample and method, full KV first: answers, score, KL, entries kept.

        Args:
            task: rows with "context", "question" and "answer"; their file (.jsonl); or a task of kvsieve.tasks.
            methods: names ("snapkv:budget=20%"; shares have no floor), role objects (default fields are set by the
                model, as for names) and plans (run as they are); a dict gives labels.
            score: of rows: contains, exact, f1, rouge, a function (answer, expected) or "package.module:function".
            options: `length`, most tokens of a prompt (default: as long as the rows; 2048 for a task), `samples`
                (default: all rows; 25 of a task), `question`, "visible" or "hidden" (see `run`), `seed` (0).

        Raises:
            InputError: rows, a method or a length that cannot be used.
        """
        rows = compared_rows(self, task, methods, score=score, **options)
        self.documents.forget()
        return rows

    def run(self, sample: Sample, plans: Sequence[Plan], question: str) -> list[Outcome]:
        """Return the outcomes of `plans`; the first must be full KV, the reference of the distances.

        question: "visible" if plans act on context and question together; "hidden" if they act on the context alone and
        the questions follow uncompressed. Raises InputError for independent visible questions.
        """
        if sample.independent and question == "visible":
            raise InputError("questions on copies of one context are asked hidden only; see --question")
        encoded = self.prompter.encode(sample)
        plans = [plan.for_model(self.model, self.prompter.tokenizer) for plan in plans]
        self._check_draft(plans)
        visible = question == "visible"
        expected = sample.turns[0].max_new_tokens
        if visible:
            states = self.documents.after_prompt(plans, encoded.context, encoded.question, expected)
        else:
            states = self.documents.after_context(plans, encoded.context, expected)
        outcomes = []
        for state in states:
            applied, notes = what_ran(state.plans[0], state.cache)
            drafts = None if self.draft is None else DraftCounts()
            outcomes.append(Outcome([], {}, state.cache.turn.record, applied, notes, drafts=drafts))
        scores: list[list[dict[str, float]]] = [[] for _ in plans]
        # Without a further turn's eviction to come the rows can stay together.
        conversations = states if visible else self._stacked(states)
        new = (None if visible else encoded.question, *encoded.followups)
        for turn, ids in zip(sample.turns, new, strict=True):
            turn_states = conversations
            if ids is not None:
                expected = turn.max_new_tokens
                # What was read of the context serves other samples as well.
                fork = sample.independent or (not visible and turn is sample.turns[0])
                turn_states = [
                    self._continue(conversation, ids, fork, visible, expected) for conversation in conversations
                ]
            if not sample.independent:
                conversations = turn_states
            found = self._answer(self._stacked(turn_states) if visible else turn_states, turn)
            for i, (outcome, per_turn) in enumerate(zip(outcomes, scores, strict=True)):
                answer, distance, drafts = found[i]
                outcome.answers.append(answer)
                if outcome.drafts is not None:
                    outcome.drafts.add(drafts)
                per_turn.append(turn.score(answer, turn.answers))
                if turn is sample.turns[0]:
                    outcome.kl, outcome.kl_last, outcome.top1 = distance
        for outcome, per_turn in zip(outcomes, scores, strict=True):
            outcome.metrics = {name: mean([turn_scores[name] for turn_scores in per_turn]) for name in per_turn[0]}
            if len(per_turn) > 1:
                outcome.metrics |= {f"turn_{i + 1}": turn_scores["score"] for i, turn_scores in enumerate(per_turn)}
        return outcomes

    def _check_draft(self, plans: Sequence[Plan]) -> None:
        """Raise KvsieveError for drafts that cannot serve one of the plans; see `check_draft`."""
        if self.draft is None or self.draft.kind == "lookup":
            return
        for plan in plans:
            with attach(self.model, plan, tokenizer=self.prompter.tokenizer) as sieve:
                check_draft(self.draft, sieve)

    def _continue(self, state: ReadState, ids: Tensor, fork: bool, act: bool, expected: int) -> ReadState:
        """Feed `ids` to conversations (to a copy with `fork`); with `act` their plan acts on them as well."""
        tokens = torch.cat([state.given, ids], 1)
        plan = state.plans[0] if act else after_prompt(state.plans[0])
        if plan.shortens_prompt:
            read = read_alone(self.model, plan, tokens, options=ReadOptions(self.chunk))
            return ReadState(state.plans, *read, tokens, state.order)
        unseen = 0 if act else state.unseen + ids.shape[1]
        if not self.documents.tables.same(state.cache.conversation.table_lengths, tokens.shape[1]):
            return self._read_anew(state, tokens, unseen)
        # Of those that go on from one state only the last one is used.
        cache = state.cache.fork(share=True) if fork else state.cache
        fed = torch.cat([state.fed, ids], 1)
        with attach(self.model, plan) as sieve, torch.no_grad():
            sieve.adopt(cache)
            cache.turn.new_tokens = expected
            if plan.read is not None or plan.is_view:
                cache.begin_turn(new_tokens=expected)
            if plan.probes or plan.drafts:
                read_prompt(sieve, fed, torch.ones_like(fed), cache, ReadOptions(self.chunk))
            logits = next_logits(sieve, cache, fed.expand(cache.conversation.batch, -1))[:, -1]
        return ReadState(state.plans, cache, logits, fed, tokens, state.order, unseen)

    def _read_anew(self, state: ReadState, given: Tensor, unseen: int) -> ReadState:
        """Prefill conversations again if their rotary tables change with the length."""
        options = ReadOptions(self.chunk, constraints=PromptConstraints(question_tokens=unseen or None))
        parts = [read_alone(self.model, plan, given, torch.ones_like(given), options) for plan in state.plans]
        cache = parts[0][0] if len(parts) == 1 else stack([cache for cache, _, _ in parts])
        logits = torch.cat([logits for _, logits, _ in parts])
        return ReadState(state.plans, cache, logits, parts[0][2], given, state.order, unseen)

    def _stacked(self, states: Sequence[ReadState]) -> list[ReadState]:
        """Stack similar states as rows of one cache; the first, the reference, stays alone."""
        groups = [[states[0]]]
        for state in states[1:]:
            group = next((rows for rows in groups[1:] if len(rows) < self.batch and self._suits(rows, state)), None)
            if group is None:
                groups.append([state])
            else:
                group.append(state)
        return [
            ReadState(
                [state.plans[0] for state in group],
                stack([state.cache for state in group]) if len(group) > 1 else group[0].cache,
                torch.cat([state.logits for state in group]),
                group[0].fed,
                group[0].given,
                [number for state in group for number in state.order],
                group[0].unseen,
            )
            for group in groups
        ]

    def _suits(self, group: Sequence[ReadState], state: ReadState) -> bool:
        """Return True if a state decodes well as a further row of a group.

        Rows cost as much as the longest: they should have similar lengths, or be small compared with the model's
        weights.
        """
        first = group[0]
        plans = (group[0].plans[0], state.plans[0])
        if plans[0].read != plans[1].read or any(
            plan.shortens_prompt or after_prompt(plan).evict is not None for plan in plans
        ):
            return False
        sizes = [_row_bytes(member.cache) for member in (*group, state)]
        small = len(sizes) * max(sizes) - sum(sizes) <= self._weights / 4
        return (small or max(sizes) <= 1.5 * min(sizes)) and can_stack([first.cache, state.cache])

    def _answer(
        self, states: Sequence[ReadState], turn: QuestionAnswer
    ) -> dict[int, tuple[str, tuple[float, float, float], DraftCounts]]:
        """Answer greedily; return, by the plan's number, its answer, its distance to the first row's, and its drafts.

        Distances are the mean KL, the KL of the first token, and the agreement.
        """
        found: dict[int, tuple[str, tuple[float, float, float], DraftCounts]] = {}
        reference: list[int] = []
        places: list[int] = []
        truth = torch.empty(0)
        for state in states:
            answers = self.decode(state, turn.max_new_tokens)
            tokens = [answer.tokens for answer in answers]
            used = [self.prompter.answer(row) for row in tokens]
            if not reference:
                places = compared_places(used[0][1], turn.spread)
                reference = tokens[0][: places[-1] + 1]
            distributions = self._distributions(state, reference, places)
            truth = truth if len(truth) else distributions
            kl = (truth.exp() * (truth - distributions)).sum(-1).clamp_min(0)
            same = (truth.argmax(-1) == distributions.argmax(-1)).float()
            for i, answer, (text, _), distance, agreed in zip(state.order, answers, used, kl, same, strict=True):
                measured = distance.mean().item(), distance[0].item(), agreed.mean().item()
                found[i] = text, measured, answer.drafts
        return found

    def decode(self, state: ReadState, limit: int, tell: Callable[[AnswerPart], None] | None = None) -> list[Answer]:
        """Answer greedily, and return the answer of each row up to the end of the turn; the state does not change.

        Args:
            state: conversations.
            limit: most tokens of an answer.
            tell: callback for each piece of text of a single row; None for no text.
        """
        check_single_answer(self.model, {})
        prompt = state.given[0].cpu()
        rules = Sampling()
        ends = self.prompter.stops
        answers = []
        for _ in state.plans:
            sampler = Sampler(rules, prompt, processors_for(self.model, prompt, rules, limit, ends))
            words = None if tell is None else Detokenizer(self.prompter.tokenizer)
            answers.append(Answer(sampler, ends, limit, words=words, tell=tell))
        self._decode(state, answers)
        return answers

    def _decode(self, state: ReadState, answers: Sequence[Answer]) -> None:
        """Decode answers to their end, with a new prefill in the same places as generate."""
        with attach(self.model, after_prompt(state.plans[0]), tokenizer=self.prompter.tokenizer) as sieve:
            rows = Rows(sieve, sieve.adopt(state.cache.fork(share=True)), answers)
            rows.take(state.logits[:, None].cpu())
            if self.draft is not None:
                given = state.given[0].tolist()
                known = len(given) - answers[0].sampler.start
                rows.open_drafts(self.draft, [[*given, *answer.tokens[known:]] for answer in answers])
            with contextlib.closing(rows):
                while rows.going and not rows.at_border:
                    step(sieve, [rows])
        for row, answer in enumerate(answers):
            if answer.finish is None:
                known = state.given.shape[1] - answer.sampler.start
                self._decode(self._anew_behind(state, row, answer.tokens[known:]), [answer])

    def _anew_behind(self, state: ReadState, row: int, made: list[int]) -> ReadState:
        """Prefill one row and its answer again if the rotary tables of its next token differ, as generate does."""
        tokens = torch.cat([state.given, state.given.new_tensor([made])], 1)
        unseen = state.unseen + len(made) if state.unseen else 0
        alone = ReadState([state.plans[row]], state.cache, state.logits[row : row + 1], tokens, tokens, [0])
        return self._read_anew(alone, tokens, unseen)

    def _distributions(self, state: ReadState, reference: list[int], places: Sequence[int]) -> Tensor:
        """Return log-probabilities float32 [rows, len(places), V] of these `reference` tokens, given earlier ones."""
        parts = [state.logits[:, None]] if places[0] == 0 else []
        with attach(self.model, after_prompt(state.plans[0])) as sieve, torch.no_grad():
            cache = sieve.adopt(state.cache.fork(share=True))
            fed = tokens_before_border(sieve, cache, len(reference) - 1)
            if fed:
                ids = torch.tensor([reference[:fed]], device=self.model.device).expand(len(state.logits), -1)
                parts.append(answer_logits(sieve, cache, ids, [place - 1 for place in places if 0 < place <= fed]))
        found = [torch.cat(parts, 1).float().log_softmax(-1)] if parts else []
        beginning = reference[: fed + 1]
        rest = [place - fed - 1 for place in places if place > fed]
        if rest:
            rows = [self._anew_behind(state, row, beginning) for row in range(len(state.logits))]
            found.append(torch.cat([self._distributions(row, reference[fed + 1 :], rest) for row in rows]))
        return torch.cat(found, 1)


def _row_bytes(cache: SieveCache) -> int:
    """Return the bytes of keys and values as a row of a batch, with every head as long as the fullest."""
    total = 0
    for layer in cache.all_layers:
        store = layer.memory
        if store is not None and not store.is_empty:
            total += max(store.lengths) * store.heads * store.entry_size()
    return total

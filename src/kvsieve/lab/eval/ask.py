"""Questions about one document, each answered under several methods; the document is prefilled once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.asked import AnswerPart
from kvsieve.errors import InputError
from kvsieve.hf.attach import attached
from kvsieve.hf.generate.acted import entries_after_prompt, what_ran
from kvsieve.hf.model.context import context_of
from kvsieve.hf.model.support import check_model
from kvsieve.hf.reuse import PromptStore, check_plans, check_servable, check_store
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.reading import DocumentReader
from kvsieve.planning.plans import Plan
from kvsieve.planning.turns import prompt_ids

# Last document tokens that are prefilled with each question.
_SPLIT = 8
# Words shown of two answers from the first difference.
_WORDS = 4


@dataclass(frozen=True)
class DocumentAnswer:
    """Answer to one question under one method.

    Attributes:
        question: index of the question.
        method: label of the method.
        text: the answer.
        tokens: ids of its tokens, without the end token.
        first_token_s: seconds from the question to the first token; without the document's prefill, for methods that
            share it.
        per_token_s: seconds per token after the first; None for an answer of one token.
        kv_bytes: bytes of the KV cache at the end of the prompt.
        kv_entries: entries per layer and KV head then, on average over the layers.
        prompt_tokens: tokens of document and question.
        applied: True if every role of the plan acted.
        notes: deviations from the request.
    """

    question: int
    method: str
    text: str
    tokens: list[int]
    first_token_s: float
    per_token_s: float | None
    kv_bytes: int
    kv_entries: float
    prompt_tokens: int
    applied: bool
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


class Asker:
    """Answers questions about a document under several methods, greedily.

    Attributes:
        plans: plans by label, with every parameter set; full KV comes first.
        document_tokens: tokens of the prompt up to the question.
        stored_tokens: document tokens reused from the store.
        prefill_s: seconds of the document's prefill, shared by all methods.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        document: str,
        plans: Mapping[str, Plan],
        *,
        system: str | None = None,
        chunk: int | None = 1024,
        max_new_tokens: int = 256,
        store: PromptStore | None = None,
    ) -> None:
        """Check that the model can run every plan.

        Args:
            model: a transformers model.
            tokenizer: its tokenizer.
            document: subject of the questions.
            plans: plans by label; the first one is the reference, full KV.
            system: system prompt; None for none.
            chunk: prompt tokens per forward pass; None for all at once.
            max_new_tokens: longest answer, in tokens.
            store: kvsieve.store.PrefixStore to find the document in, or to add it to; None for none.

        Raises:
            UnsupportedModelError, PlanError: the model cannot run one of the plans.
            InputError: the store cannot serve the model or a plan.
        """
        self.model = model
        self.document = document
        self.system = system
        self.limit = max_new_tokens
        self._evaluator = Evaluator(model, tokenizer, chunk=chunk)
        check_store(store)
        if store is not None:
            check_plans(plans.values())
            with attached(model, Plan()) as sieve:
                check_servable(sieve, {})
        # Unused room would count as memory of full KV.
        self._evaluator.documents = DocumentReader(model, chunk, store, tokenizer, room=0)
        self.plans = {label: plan.for_model(model, tokenizer) for label, plan in plans.items()}
        for plan in self.plans.values():
            check_model(model, plan)
        # Tokens shared by all prompts; a question may change the split of the document's last few.
        one = self._ids("?")
        other = self._ids("Why")
        pairs = enumerate(zip(one, other, strict=False))
        same = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))
        self._shared = one[: max(same - _SPLIT, 1)]
        self.document_tokens = len(self._shared)
        self.stored_tokens = 0
        self.prefill_s = 0.0

    def check(self, questions: Sequence[str]) -> None:
        """Raise InputError for a question that does not fit into the model's context after the document."""
        context = context_of(self.model.config)
        for question in questions:
            size = len(self._ids(question))
            if context is not None and size + 1 > context:
                raise InputError(
                    f"document and question have {size:,} tokens, the model's context ends at {context:,}: shorten the "
                    f"document, or ask about a part of it ({question[:60]!r})"
                )

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Prefill the document for all plans; progress is called with (tokens done, total tokens)."""
        began = time.perf_counter()
        documents = self._evaluator.documents
        documents.open(list(self.plans.values()), self._tensor(self._shared), progress)
        self.stored_tokens = 0 if documents.prefix is None else documents.prefix.stored
        self.prefill_s = time.perf_counter() - began

    def ask(
        self, question: str, number: int = 0, shown: Callable[[str, str], None] | None = None
    ) -> list[DocumentAnswer]:
        """Answer one question under every plan, in order.

        Args:
            question: text after the document and a blank line.
            number: index of the question.
            shown: called with a label and each generated piece of text.
        """
        evaluator = self._evaluator
        ids = self._ids(question)
        answers = list[DocumentAnswer]()
        size = len(self._shared)
        while ids[:size] != self._shared[:size]:
            size -= 1
        context = self._tensor(ids[:size])
        question_ids = self._tensor(ids[size:])
        for at, (label, plan) in enumerate(self.plans.items()):
            began = time.perf_counter()
            (state,) = evaluator.documents.after_prompt(
                list(self.plans.values()), context, question_ids, self.limit, only=[at]
            )

            def tell(part: AnswerPart, label: str = label) -> None:
                if part.text and shown is not None:
                    shown(label, part.text)

            applied, notes = what_ran(plan, state.cache)
            notes += evaluator.documents.notes(plan)
            entries, _ = entries_after_prompt(state.cache)
            kv_bytes = state.cache.nbytes()
            (answer,) = evaluator.decode(state, self.limit, tell)
            times = answer.times
            answers.append(
                DocumentAnswer(
                    question=number,
                    method=label,
                    text=answer.text.strip(),
                    tokens=[token for token in answer.tokens if token not in evaluator.prompter.stops],
                    first_token_s=times[0] - began,
                    per_token_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
                    kv_bytes=kv_bytes,
                    kv_entries=sum(entries) / max(len(entries), 1),
                    prompt_tokens=len(ids),
                    applied=applied,
                    notes=notes,
                )
            )
        return answers

    def _ids(self, question: str) -> list[int]:
        """Return the prompt of a question, as in `kvsieve run --question`."""
        user = {"role": "user", "content": f"{self.document.rstrip()}\n\n{question}"}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return prompt_ids(self._evaluator.prompter.tokenizer, [*system, user])

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.model.device)


def differs_at(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of the first differing token (from 1) of two answers, or None if they are equal."""
    return next((at for at, (one, two) in enumerate(itertools.zip_longest(reference, other), 1) if one != two), None)


def differing_words(reference: DocumentAnswer, other: DocumentAnswer) -> tuple[str, str]:
    """Return a few words of both answers from the first word that differs."""
    other_words = other.text.split()
    reference_words = reference.text.split()
    at = next((at for at, (one, two) in enumerate(zip(other_words, reference_words, strict=False)) if one != two), None)
    at = min(len(other_words), len(reference_words)) if at is None else at
    return " ".join(reference_words[at : at + _WORDS]) or "(end)", " ".join(other_words[at : at + _WORDS]) or "(end)"


@dataclass(frozen=True)
class MethodSummary:
    """Summary of one method over all questions.

    Attributes:
        method: label.
        same: answers identical to those of full KV.
        questions: number of answers.
        kv_bytes: largest KV cache at the end of a prompt, in bytes.
        kv_share: kv_bytes over those of full KV.
        first_token_s: median seconds from a question to its first token.
        per_token_s: median seconds per token; None if no answer had two.
        applied: True if every role of the plan acted on every prompt.
    """

    method: str
    same: int
    questions: int
    kv_bytes: int
    kv_share: float
    first_token_s: float
    per_token_s: float | None
    applied: bool


def summarise(answers: Sequence[DocumentAnswer]) -> list[MethodSummary]:
    """Return a summary of each method, in order; the first method is the reference."""
    by_method: dict[str, list[DocumentAnswer]] = {}
    for answer in answers:
        by_method.setdefault(answer.method, []).append(answer)
    reference = next(iter(by_method.values()), [])
    found = []
    for label, method_answers in by_method.items():
        speeds = [answer.per_token_s for answer in method_answers if answer.per_token_s is not None]
        most = max(answer.kv_bytes for answer in method_answers)
        found.append(
            MethodSummary(
                label,
                sum(one.tokens == answer.tokens for one, answer in zip(reference, method_answers, strict=True)),
                len(method_answers),
                most,
                most / max(answer.kv_bytes for answer in reference),
                _median([answer.first_token_s for answer in method_answers]),
                _median(speeds) if speeds else None,
                all(answer.applied for answer in method_answers),
            )
        )
    return found


def advice(summaries: Sequence[MethodSummary]) -> str:
    """Return a sentence on the questions with a difference from full KV per method, and the smallest without one."""
    reference, *others = summaries
    if not others:
        return "Only full KV was asked: name other methods to compare."
    total = reference.questions
    parts = [f"{other.method} differs from full KV on {other.questions - other.same} of {total}" for other in others]
    equal = [summary for summary in others if summary.same == total and summary.applied]
    least = min(equal, key=lambda summary: summary.kv_bytes, default=None)
    if not any(summary.applied for summary in others):
        end = "No method acted on every prompt: what is kept whole is full KV. Ask about more text, or set floor=0."
    elif least is None:
        end = "None gives every answer of full KV: try a larger budget, or keep full KV."
    elif least.kv_bytes >= reference.kv_bytes:
        end = f"{least.method} gives every answer of full KV, and takes as much memory."
    else:
        end = f"{least.method} gives every answer of full KV with {least.kv_share:.0%} of its memory."
    return f"{'; '.join(parts)}. {end}"


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(sorted(values), dtype=torch.float64).quantile(0.5))

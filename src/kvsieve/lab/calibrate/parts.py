"""The parts of a calibration, measured one after another on prompts that are prefilled once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.lab.calibrate import distances, pooling, ranks
from kvsieve.lab.calibrate.anchors import measured_anchors
from kvsieve.lab.calibrate.centres import query_centres
from kvsieve.lab.calibrate.entropies import QueryEntropies
from kvsieve.lab.calibrate.filters import QuerySums, checked
from kvsieve.lab.calibrate.heads import RetrievalScores, kept_by_streaming
from kvsieve.lab.calibrate.options import ANSWER, BEGINNING, Options
from kvsieve.lab.calibrate.prompts import Prompt
from kvsieve.lab.calibrate.reading import following, greedy, read
from kvsieve.lab.calibrate.utility import measured_budgets
from kvsieve.methods import SnapKV
from kvsieve.methods.lukv import SCORER
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Filters, Fingerprint, numbers
from kvsieve.shared.prompt import read_shared
from kvsieve.types import LayerContext

Progress = Callable[[int, int, str], None]


@dataclass
class ReferenceAnswer:
    """Full KV's answer to a prompt, its log-probabilities, and the window's final hidden states, for later parts."""

    ids: Tensor
    answer: Tensor
    truth: Tensor
    name: str
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Parts:
    """Parts of a calibration, measured one after another into `measured` and, by their names, `arrays`."""

    model: Any
    options: Options
    fingerprint: Fingerprint
    progress: Progress | None
    measured: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    def everything(self, prompts: Sequence[Prompt], held_out: Prompt, stops: Collection[int]) -> None:
        parts = self.options.parts
        layers = self.fingerprint.layers
        found, why_not = distances.candidates(self.model, layers, self.options.tsp_rate, self.options.max_layer)
        propagates = [part for part in ("tsp", "asl") if part in parts]
        if propagates and not found:
            # All other parts can still be measured.
            self.measured["left_out"] = {part: why_not for part in propagates}
            propagates = []
        if "asl" in propagates and layers < 4:
            self.measured["left_out"] = {"asl": f"it has too few layers ({layers})"}
            propagates.remove("asl")
        per_prompt = (
            2
            + ("pooling" in parts)
            + ("answers" in parts)
            + ("asl" in propagates)
            + len(found) * ("tsp" in propagates)
            + ("anchors" in parts)
            + ("q_centres" in parts)
            + ("head_budgets" in parts)
        )
        self.total = len(prompts) * per_prompt + ("q_filters" in parts)
        references = self._pooling(prompts, stops)
        if "answers" in parts:
            self._answers(references)
        self._queries(references, held_out)
        layer = self._tsp(references, found) if "tsp" in propagates else None
        if "asl" in propagates:
            self._asl(references, layer)
        if "anchors" in parts:
            self._anchors(references)
        if "q_centres" in parts:
            self._centres(references)
        if "head_budgets" in parts:
            self._budgets(references)

    @property
    def pooled(self) -> SnapKV:
        """SnapKV with the chosen window and pooling, or its defaults if that part was not requested."""
        chosen = self.measured.get("pooling", {})
        parameters = {name: chosen[name] for name in ("window", "kernel", "pooling") if name in chosen}
        return SnapKV(budget=Budget(ratio=0.5), **parameters)

    def _step(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)
        self.done += 1

    def _pooling(self, prompts: Sequence[Prompt], stops: Collection[int]) -> list[ReferenceAnswer]:
        """Prefill every prompt once under full KV, and compare SnapKV's settings on it."""
        wanted = "pooling" in self.options.parts
        evictors = pooling.settings(self.options, min(prompt.ids.shape[1] for prompt in prompts)) if wanted else []
        window = max((evictor.window for evictor in evictors), default=1)
        references = []
        found = []
        for prompt in prompts:
            self._step("reading prompts")
            shared = read_shared(self.model, None, prompt.ids, torch.ones_like(prompt.ids), window=window)
            answer = prompt.answer
            if answer is None:
                answer = greedy(self.model, shared.cache, shared.logits, stops, ANSWER)
            truth = following(self.model, shared.reduced(None), answer)
            references.append(ReferenceAnswer(prompt.ids, answer, truth, prompt.name))
            if wanted:
                self._step("comparing windows and kernels")
                found.append(pooling.distances(self.model, shared, evictors, answer))
        if wanted:
            kl = [sum(column) / len(column) for column in zip(*found, strict=True)]
            chosen = pooling.choose(evictors, kl)
            best = evictors[chosen]
            grid = [
                {"window": evictor.window, "pooling": evictor.pooling, "kernel": evictor.kernel, "kl": _short(value)}
                for evictor, value in zip(evictors, kl, strict=True)
            ]
            self.measured["pooling"] = {
                **{name: getattr(best, name) for name in ("window", "kernel", "pooling")},
                "budget": str(self.options.budget),
                "kl": _short(kl[chosen]),
                "grid": grid,
            }
        return references

    def _answers(self, references: Sequence[ReferenceAnswer]) -> None:
        """Find the smallest budget from which SnapKV, as chosen, gives full KV's answer, token by token."""
        pooled = self.pooled
        found = []
        for reference in references:
            self._step("testing answers")
            length = reference.ids.shape[1]
            tested = [budget for budget in self.options.budgets if pooled.window < Budget.parse(budget).entries(length)]
            evictors = [replace(pooled, budget=Budget.parse(budget)) for budget in tested]
            shared = read_shared(self.model, None, reference.ids, torch.ones_like(reference.ids), window=pooled.window)
            same = pooling.agreement(self.model, shared, evictors, reference.answer)
            wrong = max((index for index, share in enumerate(same) if share < 1), default=-1)
            found.append(
                {
                    "task": reference.name,
                    "prompt": length,
                    "tokens": reference.answer.shape[1],
                    "same": dict(zip(tested, map(_short, same), strict=True)),
                    "from": tested[wrong + 1] if wrong + 1 < len(tested) else None,
                }
            )
        self.measured["answers"] = {"budgets": list(self.options.budgets), "prompts": found}

    def _queries(self, references: Sequence[ReferenceAnswer], held_out: Prompt) -> None:
        """Run prompts with their answers and collect the queries of every layer."""
        sums = QuerySums()
        scores = RetrievalScores()
        entropies = QueryEntropies()
        wants_entropies = "entropies" in self.options.parts
        wants_heads = "heads" in self.options.parts
        wants_filters = "q_filters" in self.options.parts
        for reference in references:
            self._step("reading queries")

            prompt_ids = reference.ids
            answer = reference.answer[:, :BEGINNING]

            def see(ctx: LayerContext, tokens: Tensor = prompt_ids, answer: Tensor = answer) -> None:
                if wants_filters:
                    sums.see(ctx)
                if wants_heads:
                    scores.see(ctx, tokens, answer)
                if wants_entropies:
                    entropies.see(ctx)

            ids = torch.cat([prompt_ids, answer[:, :-1]], 1)
            hidden, _ = read(self.model, Plan(), ids, see)
            prompt = reference.ids.shape[1]
            reference.hidden = hidden[:, max(0, prompt - self.pooled.window) : prompt]
            scores.prompts += 1
        shape = self.fingerprint
        if wants_heads:
            heads = self.arrays["heads"] = numbers(scores.result(scores.scores, shape.layers, shape.kv_heads), 2)
            sinks, recent = kept_by_streaming(min(reference.ids.shape[1] for reference in references))
            flat = sorted(score for layer in heads for score in layer)
            self.measured["heads"] = {
                "sinks": sinks,
                "recent": recent,
                "median": flat[len(flat) // 2],
                "highest": flat[-1],
                "beyond": scores.result(scores.beyond, shape.layers, shape.kv_heads),
            }
        if wants_filters:
            filters = sums.result(shape.layers, shape.kv_heads, shape.head_dim)
            found = [[[round(v, 4) for v in head] for head in layer.tolist()] for layer in filters]
            self.arrays["q_filters"] = numbers(found, 3)
            self._step("checking filters")
            self.measured["q_filters"] = checked(self.model, filters, held_out.ids)
        if wants_entropies:
            self.arrays["entropies"], self.measured["entropies"] = entropies.result(shape.layers, shape.kv_heads)

    def _tsp(self, references: Sequence[ReferenceAnswer], found: Sequence[int]) -> int:
        rate = self.options.tsp_rate
        pooled = self.pooled
        means = []
        worst = []
        every = self.options.every_layer
        for layer in found if every else found[::-1]:
            distances_here = []
            for reference in references:
                self._step(f"dropping tokens after layer {layer}")
                full = (reference.hidden, reference.answer, reference.truth)
                distances_here.append(distances.distance(self.model, reference.ids, layer, rate, pooled, *full))
            means.append(distances.mean(distances_here))
            worst.append(max(one.relative for one in distances_here))
            if not every and not distances.is_near(means[-1], self.options.tolerance):
                break
        self.total -= (len(found) - len(means)) * len(references)
        if not every:
            found = found[-len(means) :]
            means = means[::-1]
            worst = worst[::-1]
        index, settled = distances.choose_layer(means, self.options.rule, self.options.tolerance)
        tolerance = self.options.tolerance
        if tolerance is None:
            tolerance = distances.TOLERANCE if self.options.rule == "settled" else 0.0
        self.measured["tsp"] = {
            "layer": found[index],
            "rule": self.options.rule,
            "tolerance": tolerance,
            "settled": settled,
            "rate": str(rate),
            "window": pooled.window,
            "kernel": pooled.kernel,
            "pooling": pooled.pooling,
            "layers": list(found),
            "distance": [_short(mean.last) for mean in means],
            "distance_window": [_short(mean.window) for mean in means],
            "relative": [_short(mean.relative) for mean in means],
            "relative_worst": [_short(value) for value in worst],
            "kl": [_short(mean.kl) for mean in means],
        }
        return found[index]

    def _asl(self, references: Sequence[ReferenceAnswer], layer: int | None) -> None:
        observed = ranks.observed_layers(self.fingerprint.layers)
        start = observed - 1
        rate = self.options.tsp_rate
        window = self.pooled.window
        lengths = [reference.ids.shape[1] for reference in references]
        if not all(window < rate.entries(length) < length for length in lengths):  # type: ignore[union-attr]
            reason = f"a rate of {rate} and a window of {window} leave nothing to rank"
            self.measured.setdefault("left_out", {})["asl"] = reason
            return
        traces = []
        for reference in references:
            self._step("following ranks")
            traces.append(ranks.trace(self.model, reference.ids, rate, self.pooled, observed))
        if layer is None:
            layer = max(start, self.fingerprint.layers // 3)
        best = ranks.recommend(traces, start, layer)
        self.measured["asl"] = {
            "first": best.first,
            "tau": best.tau,
            "observed": observed,
            "not_before": layer,
            "adapts": best.adapts,
            "selects_at": best.layers,
            "first_of_trace": start,
            "variance": [[_short(value) for value in trace] for trace in traces],
        }

    def _anchors(self, references: Sequence[ReferenceAnswer]) -> None:
        """Choose the layers whose choice of entries the layers after them may read."""
        answers = [(reference.ids, reference.answer[:, :BEGINNING]) for reference in references]
        self.measured["anchors"] = measured_anchors(
            self.model, answers, self.fingerprint, lambda: self._step("comparing layers")
        )

    def _centres(self, references: Sequence[ReferenceAnswer]) -> None:
        ids = [reference.ids for reference in references]
        found = query_centres(self.model, ids, self.fingerprint, lambda: self._step("averaging queries"))
        if isinstance(found, str):
            self.measured.setdefault("left_out", {})["q_centres"] = found
            return
        self.arrays["q_centres"] = _array(found)
        self.measured["q_centres"] = {"queries": sum(one.shape[1] for one in ids)}

    def _budgets(self, references: Sequence[ReferenceAnswer]) -> None:
        """Find the share of its entries that each head keeps at every budget."""
        answers = [(reference.ids, reference.answer) for reference in references]
        found = measured_budgets(self.model, answers, self.fingerprint, SCORER, lambda: self._step("pricing entries"))
        if isinstance(found, str):
            self.measured.setdefault("left_out", {})["head_budgets"] = found
            return
        self.arrays["head_budgets"] = _array(found)
        least, largest = map(_short, (found[..., 19].min().item(), found[..., 19].max().item()))
        self.measured["head_budgets"] = {"budget": "20%", "least": least, "largest": largest}


def _array(found: Tensor) -> Filters:
    return numbers([[[_short(value) for value in head] for head in layer] for layer in found.tolist()], 3)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if abs(value) < float("inf") else None

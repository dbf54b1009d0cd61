"""What codecs lose, and take: distance to full KV, needle score and bytes, with and without eviction; and drift.

    python benchmarks/answers/codecs.py [--model DIR] [--lengths 2048,7500] [--samples 6] [--codecs SPECS] [--out FILE]
    python benchmarks/answers/codecs.py --parts drift,planted,rest,peer [--drift-tokens 2000] --out FILE

A file that is there already, of the same model, is completed: what it has is not measured again.

quality: samples of the needle task, the question visible. kl: mean over the tokens of full KV's own answer, in nats, of
KL(full KV || plan). score: of the answer that the plan gives. kv: bytes of keys and values once the prompt is complete,
scales, padding and exact entries included, over those of full KV at 16 bits. Plans: every codec, every codec after
SnapKV, SnapKV alone, and SnapKV with the rest in few bits.

drift: full KV reads a text and goes on greedily; every codec reads the same and is given that answer. KL by position,
in 8 bins of equal width. No token ends it.

planted: quality where one pair of channels of every key head, that rotary embeddings turn together, is multiplied by 50
and that of its queries divided by it: full KV says what it said, and codecs meet the channels that some models have.

rest: KL by task of SnapKV, 10% of the entries exact (--rest-budget), with the rest in 2 bits, or its keys in 3
(--rests), and of SnapKV alone with the budget that takes as many bytes.

peer: seconds per token and KL beside transformers' QuantizedCache (hqq, 4 bits, which needs that package), all fed the
answer of full KV, token by token, in turns; medians over the rounds, ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

import kvsieve
from kvsieve.cache import PackedStore
from kvsieve.cli.document import build_document
from kvsieve.hf.compat import CACHE
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.lab.tasks.needle import Needle
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.plans import Plan
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table
from kvsieve.shared.prompt import answer_logits, read_shared

CODECS = (
    "int8,fp8,kivi:bits=8,k8v4,kivi:bits=4,hqq:bits=4,outlier:bits=4,rotated:bits=4,"
    "kivi:bits=3,hqq:bits=3,outlier:bits=3,rotated:bits=3,kivi:bits=2,hqq:bits=2,outlier:bits=2,rotated:bits=2"
)
# Of the part planted.
PLANTED = (
    "int8,k8v4,kivi:bits=4,hqq:bits=4,rotated:bits=4,k8v4:key_bits=4:value_bits=2:rotate_values=true,rotated:bits=3,"
    "kivi:bits=2,rotated:bits=2"
)
RESTS = ("2bit", "3bit", "4bit")
# Of the part rest.
EQUAL_RESTS = ("2bit", "rotated:bits=2:key_bits=3")
REST_TASKS = ("needle", "ruler_niah_multikey_1", "ruler_niah_multivalue", "ruler_qa_1", "ruler_fwe", "passkey64")
PEER, PEER_TOKENS = "QuantizedCache, hqq 4 bits", 33
BINS = 8
# Tokens of a given answer that are compared at once, so that their logits fit beside the model.
_PIECE = 64


def plans_of(codecs: list[str], budgets: list[str]) -> dict[str, Plan]:
    """Label -> plan; full KV first."""
    plans = {"full": Plan(), **{codec: plan_without_floor("full", codec=codec) for codec in codecs}}
    for budget in budgets:
        name = f"snapkv {budget}"
        plans[name] = plan_without_floor("snapkv", budget=budget)
        plans |= {f"{name} rest={rest}": plan_without_floor("snapkv", budget=budget, rest=rest) for rest in RESTS}
        plans |= {f"{name} {codec}": plan_without_floor("snapkv", budget=budget, codec=codec) for codec in codecs}
    return plans


def kv_shares(model: Any, tokenizer: Any, plans: dict[str, Plan], tokens: int) -> dict[str, float]:
    """Bytes of keys and values of a prompt of `tokens` tokens, over 16 bits for every number of full KV."""
    settled = {name: plan.for_model(model, tokenizer) for name, plan in plans.items()}
    window = max(32, *(plan.window for plan in settled.values()))
    evictors = [plan.evict for plan in settled.values()]
    options = ReadOptions(1024)
    shared = read_shared(model, None, document(tokenizer, tokens), window=window, evictors=evictors, options=options)
    shares = {}
    for name, plan in settled.items():
        cache = shared.reduced(plan.evict, plan.codec, plan.rest)
        stores = [layer.store for layer in cache.sieve_layers.values()]
        whole = sum(tokens * store.heads * sum(store.dims) * 2 for store in stores)
        # Full KV, and what an evictor keeps exact, is computed in more bits on some machines, and stored in 16.
        shares[name] = sum(map(held, stores)) / whole
    return shares


def held(store: Any) -> float:
    """Bytes of a store, its exact entries in 16 bits, without room for tokens to come where all are exact."""
    exact = store.exact if isinstance(store, PackedStore) else store
    keys, values, _ = exact.buffers()
    wide = (keys.element_size() - 2) / keys.element_size()
    if exact is store:
        return len(store.lengths) * store.heads * store.size * sum(store.dims) * 2
    return store.entry_bytes() - wide * (keys.untyped_storage().nbytes() + values.untyped_storage().nbytes())


def document(tokenizer: Any, tokens: int) -> torch.Tensor:
    text = build_document(tokenizer, tokens + 64, 0.5, "7305816")
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :tokens]


def quality(model: Any, tokenizer: Any, plans: dict[str, Plan], length: int, samples: int) -> list[dict[str, Any]]:
    """One row per plan: means over the samples."""
    evaluator, task = Evaluator(model, tokenizer, chunk=1024), Needle(load_haystack("topics"))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in plans}
    for index in range(samples):
        # Depths all over the text.
        sample = task.sample(index * 11 // samples, length, index, evaluator.prompter.count)
        outcomes = evaluator.run(sample, list(plans.values()), "visible")
        for name, one in zip(plans, outcomes, strict=True):
            found[name].append((one.kl, one.top1, one.metrics["score"]))
        print(f"{length} tokens: {index + 1} of {samples}", flush=True)
    rows, shares = [], kv_shares(model, tokenizer, plans, length)
    for name in plans:
        kl, top1, score = (statistics.mean(each) for each in zip(*found[name], strict=True))
        per_sample = [round(each[0], 6) for each in found[name]]
        rows.append(
            {
                "tokens": length,
                "plan": name,
                "kl": round(kl, 6),
                "kl_per_sample": per_sample,
                "top1": round(top1, 4),
                "score": round(score, 4),
                "kv": round(shares[name], 5),
            }
        )
    return rows


def planted(model: Any, factor: float) -> None:
    """Multiply a pair of channels of all keys, and divide that of queries."""
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in model.get_decoder().layers:
        for linear, by in ((layer.self_attn.q_proj, 1 / factor), (layer.self_attn.k_proj, factor)):
            for part in (linear.weight, linear.bias):
                if part is not None:
                    part.data.unflatten(0, (-1, dim))[:, [dim // 4, dim // 4 + dim // 2]] *= by


def rests(
    model: Any, tokenizer: Any, length: int, samples: int, budget: str, tasks: list[str], named: list[str]
) -> list[dict[str, Any]]:
    """One row per task and codec of the rest: KL with it, `budget` exact, and of plain eviction that takes as many.

    Bytes are meant, and entries by `budget`.

    named: the codecs.
    """
    kept = {rest: plan_without_floor("snapkv", budget=budget, rest=rest) for rest in named}
    shares = kv_shares(model, tokenizer, kept, length)
    plans = [Plan()]
    for rest, plan in kept.items():
        plans += [plan, plan_without_floor("snapkv", budget=f"{100 * shares[rest]:.2f}%")]
    evaluator, rows = Evaluator(model, tokenizer, chunk=1024), []
    for task in chosen_tasks(tasks, "topics"):
        found: dict[str, list[list[float]]] = {rest: [] for rest in named}
        for index in range(samples):
            sample = task.sample(index * 11 // samples, length, index, evaluator.prompter.count)
            lost = [one.kl for one in evaluator.run(sample, plans, "visible")[1:]]
            for at, rest in enumerate(named):
                found[rest].append(lost[2 * at : 2 * at + 2])
            print(f"rest: {task.name} {lost}", flush=True)
        for rest, each in found.items():
            means = [round(statistics.mean(part), 6) for part in zip(*each, strict=True)]
            names = {"kl_rest": means[0], "kl_evicted": means[1], "per_sample": each}
            row = {"task": task.name, "rest": rest, "tokens": length, "kv": round(shares[rest], 5), "samples": samples}
            rows.append(row | names)
    return rows


class Peer:
    """Full KV, a plan, or transformers' own cache, fed tokens one by one through the model's own call."""

    def __init__(self, model: Any, plan: Plan | None, make: Callable[[], Any] | None) -> None:
        self.model, self.plan, self.make = model, plan, make

    def run(self, ids: torch.Tensor, answer: torch.Tensor) -> tuple[list[float], torch.Tensor]:
        """Seconds of each token of an answer, and log probabilities [T, V] after the prompt and these."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.plan is not None:
                cache: Any = stack.enter_context(kvsieve.attach(self.model, self.plan)).new_cache()
            else:
                assert self.make is not None
                cache = self.make()
            said = [self.model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[0, -1]]
            seconds = []
            for token in answer[0]:
                began = time.perf_counter()
                said.append(self.model(token.view(1, 1), **{CACHE: cache}, use_cache=True).logits[0, -1])
                seconds.append(time.perf_counter() - began)
        return seconds, torch.stack(said).float().log_softmax(-1)


def peers(model: Any, tokenizer: Any, codecs: list[str], length: int, rounds: int) -> list[dict[str, Any]]:
    """One row per contender; the first token of an answer warms up."""
    ids = document(tokenizer, length)
    with kvsieve.attach(model, Plan()) as sieve, torch.no_grad():
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": PEER_TOKENS}
        answer = sieve.generate(ids, chunk=1024, **options).sequences[:, length:]
    theirs = {"backend": "hqq", "config": model.config, "nbits": 4, "axis_key": 1, "axis_value": 1}
    contenders = {
        PEER: Peer(model, None, lambda: QuantizedCache(**theirs)),
        "transformers": Peer(model, None, lambda: DynamicCache(config=model.config)),
        "full": Peer(model, Plan(), None),
        **{codec: Peer(model, plan_without_floor("full", codec=codec), None) for codec in codecs},
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    said: dict[str, torch.Tensor] = {}
    for turn in range(rounds):
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, said[name] = contenders[name].run(ids, answer)
            spent[name].append(statistics.median(seconds[1:]))
            print(f"peer: {name} {spent[name][-1]:.4f}", flush=True)
    rows = []
    for name in contenders:
        kl = (said["full"].exp() * (said["full"] - said[name])).sum(-1).clamp_min(0).mean().item()
        ratios = {
            f"tpot_to_{to}": round(statistics.median(a / b for a, b in zip(spent[name], spent[to], strict=True)), 4)
            for to in (PEER, "full")
        }
        row = {"tokens": length, "answer": PEER_TOKENS, "rounds": rounds, "cache": name, "kl": round(kl, 6)}
        rows.append(row | {"tpot_s": round(statistics.median(spent[name]), 5)} | ratios)
    return rows


def drift(model: Any, tokenizer: Any, codecs: list[str], length: int, tokens: int) -> list[dict[str, Any]]:
    """KL by position of an answer of full KV, for every codec."""
    ids = document(tokenizer, length)
    with kvsieve.attach(model, Plan()) as sieve, torch.no_grad():
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens + 1}
        answer = sieve.generate(ids, **options).sequences[:, length:]
    plans = [Plan(), *(plan_without_floor("full", codec=codec) for codec in codecs)]
    caches = []
    for plan in plans:
        with kvsieve.attach(model, plan) as sieve, torch.no_grad():
            caches.append(sieve.prefill(ids, chunk=1024))
    found: list[list[torch.Tensor]] = [[] for _ in codecs]
    for number, piece in enumerate(answer[:, :tokens].split(_PIECE, 1)):
        said = []
        for plan, cache in zip(plans, caches, strict=True):
            with kvsieve.attach(model, plan) as sieve, torch.no_grad():
                sieve.adopt(cache)
                said.append(answer_logits(sieve, cache, piece)[0].float().log_softmax(-1))
        for each, mine in zip(found, said[1:], strict=True):
            each.append((said[0].exp() * (said[0] - mine)).sum(-1).clamp_min(0))
        print(f"drift: {number * _PIECE} of {tokens}", flush=True)
    rows = []
    for name, parts in zip(codecs, found, strict=True):
        kl = torch.cat(parts)
        bins = [round(part.mean().item(), 6) for part in kl.tensor_split(BINS)]
        rows.append({"tokens": length, "answer": tokens, "plan": name, "kl": round(kl.mean().item(), 6), "bins": bins})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="A directory or hub id. Default: the demo model.")
    parser.add_argument("--parts", default="quality,drift")
    parser.add_argument("--lengths", default="2048,7500")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--codecs", help="Default: all, and fewer for the part planted alone.")
    parser.add_argument("--budgets", default="10%,25%")
    parser.add_argument("--rest-budget", default="10%", help="Of the part rest: entries that stay exact.")
    parser.add_argument("--rest-tasks", default=",".join(REST_TASKS), help="Of the part rest.")
    parser.add_argument("--rests", default=",".join(EQUAL_RESTS), help="Codecs of the part rest.")
    parser.add_argument("--rounds", type=int, default=3, help="Of the part peer.")
    parser.add_argument("--drift-length", type=int, default=2048)
    parser.add_argument("--drift-tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "codecs.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model)
    name = given.model or "SmolLM2-135M-Instruct (demo model)"
    chosen = given.codecs or (PLANTED if given.parts == "planted" else CODECS)
    codecs = [each for each in chosen.split(",") if each]
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}",
        "samples": given.samples,
    }
    if given.out.exists():
        known = json.loads(given.out.read_text())
        if all(known[each] == report[each] for each in ("model", "samples")):
            report = known

    def add(part: str, made: Callable[[], list[dict[str, Any]]]) -> None:
        if part.partition(" ")[0] not in given.parts.split(",") or part in report:
            return
        report[part] = made()
        write_result(given.out, report)

    budgets = [each for each in given.budgets.split(",") if each]
    for length in map(int, given.lengths.split(",")):
        plans = plans_of(codecs, budgets)
        add(f"quality {length}", lambda n=length, p=plans: quality(model, tokenizer, p, n, given.samples))
        exact = given.rest_budget
        part = f"rest {length}" if exact == "10%" else f"rest {length} {exact}"
        arguments = given.samples, exact, given.rest_tasks.split(","), given.rests.split(",")
        add(part, lambda n=length, t=arguments: rests(model, tokenizer, n, *t))
        add(f"peer {length}", lambda n=length: peers(model, tokenizer, codecs, n, given.rounds))
    add("drift", lambda: drift(model, tokenizer, codecs, given.drift_length, given.drift_tokens))
    if "planted" in given.parts.split(","):
        planted(model, 50.0)
        length = int(given.lengths.partition(",")[0])
        add(f"planted {length}", lambda: quality(model, tokenizer, plans_of(codecs, []), length, given.samples))
    keys = ("tokens", "plan", "kl", "top1", "score", "kv")
    for part, rows in report.items():
        if part.startswith(("quality", "planted")):
            print(part, markdown_table(list(keys), [[str(row[key]) for key in keys] for row in rows]), sep="\n\n")


if __name__ == "__main__":
    main()

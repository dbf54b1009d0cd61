"""What codecs lose, and take: distance to full KV, needle score and bytes, with and without eviction; and drift.

    python benchmarks/codecs.py [--model DIR] [--lengths 2048,7500] [--samples 6] [--codecs SPECS] [--out FILE]
    python benchmarks/codecs.py --parts drift [--drift-tokens 2000]

quality: samples of the needle task, the question visible. kl: mean over the tokens of full KV's own answer, in nats, of
KL(full KV || plan). score: of the answer that the plan gives. kv: bytes of keys and values once the prompt is complete,
scales, padding and exact entries included, over those of full KV at 16 bits. Plans: every codec, every codec after
SnapKV, SnapKV alone, and SnapKV with the rest in few bits.

drift: full KV reads a text and goes on greedily; every codec reads the same and is given that answer. KL by position,
in 8 bins of equal width. No token ends it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.cache import PackedStore
from kvsieve.cli.document import build_document
from kvsieve.eval.evaluator import Evaluator
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.shared import answer_logits, read_shared
from kvsieve.plans import Plan
from kvsieve.report.environment import environment
from kvsieve.report.tables import markdown_table
from kvsieve.tasks.haystack import load_haystack
from kvsieve.tasks.needle import Needle

CODECS = (
    "int8,fp8,kivi:bits=8,k8v4,kivi:bits=4,hqq:bits=4,outlier:bits=4,rotated:bits=4,"
    "kivi:bits=3,hqq:bits=3,outlier:bits=3,rotated:bits=3,kivi:bits=2,hqq:bits=2,outlier:bits=2,rotated:bits=2"
)
RESTS = ("2bit", "3bit", "4bit")
BINS = 8
# Tokens of a given answer that are compared at once, so that their logits fit beside the model.
_PIECE = 64


def plans_of(codecs: list[str], budgets: list[str]) -> dict[str, Plan]:
    """Label -> plan; full KV first."""
    plans = {"full": Plan(), **{codec: kvsieve.plan("full", codec=codec) for codec in codecs}}
    for budget in budgets:
        name = f"snapkv {budget}"
        plans[name] = kvsieve.plan("snapkv", budget=budget)
        plans |= {f"{name} rest={rest}": kvsieve.plan("snapkv", budget=budget, rest=rest) for rest in RESTS}
        plans |= {f"{name} {codec}": kvsieve.plan("snapkv", budget=budget, codec=codec) for codec in codecs}
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


def drift(model: Any, tokenizer: Any, codecs: list[str], length: int, tokens: int) -> list[dict[str, Any]]:
    """KL by position of an answer of full KV, for every codec."""
    ids = document(tokenizer, length)
    with kvsieve.attach(model, Plan()) as sieve, torch.no_grad():
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens + 1}
        answer = sieve.generate(ids, **options).sequences[:, length:]
    plans = [Plan(), *(kvsieve.plan("full", codec=codec) for codec in codecs)]
    rows = []
    for name, plan in zip(codecs, plans[1:], strict=True):
        kl = torch.cat(list(_distances(model, plan, ids, answer[:, :tokens])))
        bins = [round(part.mean().item(), 6) for part in kl.tensor_split(BINS)]
        rows.append({"tokens": length, "answer": tokens, "plan": name, "kl": round(kl.mean().item(), 6), "bins": bins})
        print(f"drift: {name} {bins}", flush=True)
    return rows


def _distances(model: Any, plan: Plan, ids: torch.Tensor, answer: torch.Tensor):
    """KL(full KV || plan) after each token of a given answer, a piece at a time."""
    caches = []
    for each in (Plan(), plan):
        with kvsieve.attach(model, each) as sieve, torch.no_grad():
            caches.append(sieve.prefill(ids, chunk=1024))
    for piece in answer.split(_PIECE, 1):
        found = []
        for each, cache in zip((Plan(), plan), caches, strict=True):
            with kvsieve.attach(model, each) as sieve, torch.no_grad():
                sieve.adopt(cache)
                found.append(answer_logits(sieve, cache, piece)[0].float().log_softmax(-1))
        truth, given = found
        yield (truth.exp() * (truth - given)).sum(-1).clamp_min(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="A directory or hub id. Default: the demo model.")
    parser.add_argument("--parts", default="quality,drift")
    parser.add_argument("--lengths", default="2048,7500")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--budgets", default="10%,25%")
    parser.add_argument("--drift-length", type=int, default=2048)
    parser.add_argument("--drift-tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "codecs.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model)
    name = given.model or "SmolLM2-135M-Instruct (demo model)"
    codecs = [each for each in given.codecs.split(",") if each]
    report: dict[str, Any] = {
        "environment": environment(),
        "model": f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}",
        "samples": given.samples,
    }
    if "quality" in given.parts:
        plans = plans_of(codecs, [each for each in given.budgets.split(",") if each])
        report["quality"] = []
        for length in map(int, given.lengths.split(",")):
            report["quality"] += quality(model, tokenizer, plans, length, given.samples)
        keys = ("tokens", "plan", "kl", "top1", "score", "kv")
        print(markdown_table(list(keys), [[str(row[key]) for key in keys] for row in report["quality"]]))
    if "drift" in given.parts:
        report["drift"] = drift(model, tokenizer, codecs, given.drift_length, given.drift_tokens)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

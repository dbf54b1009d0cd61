"""Writes a plausible results directory, without a model."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

TITLES = {
    "needle": "Needle in a haystack",
    "ruler_niah_single_1": "RULER: one needle, repeated noise",
    "ruler_niah_multikey_1": "RULER: one needle among several keys",
    "ruler_niah_multivalue": "RULER: several values of one key",
    "ruler_vt": "RULER: variable tracking",
    "ruler_cwe": "RULER: common words",
    "passkey": "Passkey",
    "kv_retrieval": "Key-value retrieval in JSON",
    "multi_turn": "Questions in several turns",
}
LABELS = {  # label -> how much of the answers it loses
    "full": 0.0,
    "fastkv tsp_layer=22 tsp_rate=0.3 window=32 kernel=21 pooling=avg": 0.5,
    "snapkv kernel=21": 0.7,
    "h2o": 1.2,
    "streaming_llm sinks=4": 2.2,
    "gemfilter layer=13": 0.9,
    "pyramidkv beta=20 window=32 kernel=7": 0.8,
}
HOSTILE = "<script>alert('no')</script> & <b>bold</b>"
LAYERS, BINS = 30, 64


def write_results(folder, *, tasks=9, labels=7, budgets=("5%", "10%", "20%"), lengths=(2048, 4096),
                  questions=("visible", "hidden"), samples=10, repeats=3):  # fmt: skip
    """Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    names, chosen = list(TITLES)[:tasks], list(LABELS)[:labels]
    machine = {"time": "2025-11-21T07:26:14+00:00", "kvsieve": "0.1.0", "commit": "db01fda121c7", "python": "3.11.7",
               "torch": "2.13.0+cpu", "transformers": "5.23.0", "system": "Linux x86_64", "processor": "AMD EPYC",
               "cores": 2, "threads": 2, "device": "cpu"}  # fmt: skip
    run = {"format": 1, "model": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "seed": 0, "haystack": "topics",
           "environments": [machine, {**machine, "time": "2025-11-21T09:02:00+00:00", "command": "kvsieve eval"}],
           "seconds": 5134.5,
           "tasks": {name: TITLES[name] for name in names}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    runs = [(label, budget) for label in chosen for budget in ([None] if label == "full" else budgets)]
    cases = itertools.product(lengths, questions, range(samples), enumerate(names), runs)
    _write(folder / "samples.jsonl", [_sample(chance, *case) for case in cases])
    order = itertools.product(lengths, range(repeats), runs)
    _write(folder / "costs.jsonl", [_cost(chance, *case) for case in order])
    return folder


def _write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _share(budget):
    return 1.0 if budget is None else float(budget.rstrip("%")) / 100


def _sample(chance, length, question, index, task, run):
    (number, task), (label, budget) = task, run
    share = _share(budget)
    loss = 0.0 if label == "full" else LABELS[label] * (0.25 + 0.4 * (question == "hidden")) * (0.1 / share) ** 0.4
    depth = index % 5 / 4
    skill = max(0.05, (0.97 - 0.07 * number) * (1 - loss) - (0.15 if 0 < depth < 1 else 0) * loss)
    right = chance.random() < skill
    ran = not (label == "h2o" and task == "needle" and index == 0)
    answers = [f"It is {7421 if right else 1234}."] if index else [f"{HOSTILE} 7421 {'long ' * 80}"]
    return {
        "task": task, "length": length, "question": question, "sample": index, "method": label.split()[0],
        "label": label, "budget": budget, "score": float(right),
        "metrics": {"score": float(right), "exact": float(right and index % 2), "first_token": float(right)},
        "answers": answers, "expected": [["7421"]], "prompt_tokens": length - 8, "kv_entries": share * (length - 8),
        "kv_share": share, "deep_tokens": length - 8, "applied": ran, "kl": loss * chance.uniform(0.1, 0.6),
        "top1": 1 - 0.3 * min(loss, 1) * chance.random(), "kl_last": loss * chance.random(), "meta": {"depth": depth},
        "seed": 0, "env": 0, "notes": [] if ran else ["the budget holds the whole prompt: nothing was dropped"],
    }  # fmt: skip


def _cost(chance, length, repeat, run):
    label, budget = run
    share = _share(budget)
    faster = 0.55 if label.startswith(("fastkv", "gemfilter")) else 1.02 if budget else 1.0
    tpot = 0.02 + 0.000004 * length * share
    tokens = [tpot * chance.uniform(0.95, 1.2) for _ in range(31)]
    kv = int(length * share) * LAYERS * 3 * 64 * 2 * 2
    kept = [[min(1.0, share * chance.uniform(0.2, 1.8) + (spot > 61) + (spot < 1 < layer)) for spot in range(BINS)]
            for layer in range(LAYERS)]  # fmt: skip
    return {
        "length": length, "method": label.split()[0], "label": label, "budget": budget,
        "repeat": repeat, "prompt_tokens": length - 8, "new_tokens": 32,
        "ttft_s": length / 1100 * faster * chance.uniform(0.97, 1.05), "tpot_s": sorted(tokens)[15], "token_s": tokens,
        "kv_bytes": kv, "kv_read_bytes": kv, "peak_bytes": kv + 4 * 10**8, "deep_tokens": int((length - 8) * faster),
        "kv_entries": [int(length * share)] * LAYERS, "kept": kept if budget else [[1.0] * BINS] * LAYERS,
        "seed": 0, "env": 0,
    }  # fmt: skip

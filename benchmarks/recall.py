"""How much of what the oracle reads do Quest, SparQ and HSA read at equal traffic? Per layer, on real and random keys.

    python benchmarks/recall.py [--length 4000] [--budgets 128,256,512] [--steps 24] [--out FILE]

Real: the demo model reads a text; then each next token's queries are shown to all readers, and everything is read, so
that all see the same. Random: normally distributed keys and queries of the same shapes, each key by itself; correlated:
the same, where a key is 0.9 of the one before it and the rest new, as neighbours in a text are alike. A reader that
spends t entries per step reads t/2 of them exactly; the oracle are the t/2 entries with most softmax weight, summed
over the query heads of a KV head. Recall: the part of them that was read. Mass: the softmax weight that was read, over
the oracle's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kvsieve
from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.page_weights import page_softmax
from kvsieve.devices import auto_dtype
from kvsieve.hf.shared import next_logits
from kvsieve.methods import HSA, ExactTopK, Quest, SparQ
from kvsieve.methods.readers import Setting
from kvsieve.report.environment import environment
from kvsieve.roles import Reader
from kvsieve.tasks.haystack import load_haystack

READERS = {"hsa": HSA, "quest": Quest, "sparq": SparQ}


@dataclass(frozen=True)
class Judge(Reader):
    """A reader that reads everything and notes what others would have read. found: (reader, budget, layer) -> pairs."""

    budgets: tuple[int, ...]
    found: dict = field(default_factory=lambda: defaultdict(list), compare=False)

    def setting(self, facts: ReadFacts) -> ReadFacts:
        return facts

    def reads_all(self, setting: ReadFacts, size: int) -> bool:
        return False

    def choose(self, query, kv_rows: KVRows, state: dict, scale: float, facts: ReadFacts, terms=None) -> Choice:
        keys = kv_rows.keys_at(kv_rows.span(0, kv_rows.size)).float()
        logits = query.float() @ keys.transpose(1, 2) * scale
        weights = page_softmax(logits, kv_rows.size, 1, terms=terms).sum(1)
        for budget in self.budgets:
            oracle = ExactTopK(budget=budget, per_group=True)
            best = oracle.choose(query, kv_rows, {}, scale, Setting(budget, budget // 2), terms).entries
            for name, kind in READERS.items():
                reader = kind(budget=budget, newest=False)
                own = state.setdefault(f"{name} {budget}", _Own())
                entries = reader.choose(query, kv_rows, own.state, scale, reader.setting(facts), terms).entries
                hit = (entries[:, :, None] == best[:, None, :]).any(1).float().mean()
                mass = weights.gather(1, entries).sum(1) / weights.gather(1, best).sum(1)
                self.found[name, budget, facts.layer_idx].append((hit.item(), mass.mean().item()))
        return Choice(kv_rows.span(0, kv_rows.size))


class _Own:
    """One reader's memory of the KV rows."""

    def __init__(self) -> None:
        self.state: dict = {}

    def nbytes(self) -> int:
        return 0


def real(judge: Judge, length: int, steps: int) -> int:
    model, tokenizer = kvsieve.models.load_demo()
    ids = tokenizer(load_haystack("topics"), return_tensors="pt", verbose=False).input_ids[:, : length + steps]
    with kvsieve.attach(model, kvsieve.Plan(read=judge, name="judge")) as sieve, torch.no_grad():
        cache = sieve.prefill(ids[:, :length], chunk=1024)
        for end in range(length + 1, length + steps + 1):
            next_logits(sieve, cache, ids[:, :end])
    return len(cache.layers)


def random(judge: Judge, length: int, steps: int, like: float, heads: int = 3, groups: int = 3, dim: int = 64) -> None:
    """like: correlation of a key with the one before it."""
    made = torch.Generator().manual_seed(0)
    keys = torch.randn(heads, length + steps, dim, generator=made)
    for at in range(1, length + steps):
        keys[:, at] = like * keys[:, at - 1] + (1 - like**2) ** 0.5 * keys[:, at]
    flat, tail = keys.flatten(0, 1), torch.arange(heads) * (length + steps)
    state: dict = {}
    for size in range(length + 1, length + steps + 1):
        query = torch.randn(heads, groups, dim, generator=made)
        kv_rows = KVRows(flat, flat, None, tail, 1, size)
        judge.choose(query, kv_rows, state, dim**-0.5, ReadFacts(0, 1, length, 0, dim))


def table(judge: Judge) -> dict:
    """reader -> budget -> recall and mass, per layer and on average."""
    out: dict = {}
    for name in READERS:
        for budget in judge.budgets:
            layers = sorted(layer for reader, t, layer in judge.found if (reader, t) == (name, budget))
            pairs = [judge.found[name, budget, layer] for layer in layers]
            recall, mass = ([round(statistics.mean(p[i] for p in each), 4) for each in pairs] for i in (0, 1))
            out.setdefault(name, {})[str(budget)] = {
                "recall": round(statistics.mean(recall), 4),
                "mass": round(statistics.mean(mass), 4),
                "recall_per_layer": recall,
                "mass_per_layer": mass,
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--budgets", default="128,256,512")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recall.json")
    arguments = parser.parse_args()
    budgets = tuple(int(each) for each in arguments.budgets.split(","))
    on_text, at_random, correlated = Judge(budgets), Judge(budgets), Judge(budgets)
    layers = real(on_text, arguments.length, arguments.steps)
    random(at_random, arguments.length, arguments.steps, 0.0)
    random(correlated, arguments.length, arguments.steps, 0.9)
    report = {
        "environment": environment(),
        "model": f"SmolLM2-135M-Instruct (demo model), {auto_dtype('cpu').name}",
        "length": arguments.length,
        "steps": arguments.steps,
        "real": table(on_text),
        "random": table(at_random),
        "correlated": table(correlated),
    }
    for budget in map(str, budgets):
        print(f"budget {budget}: recall of the oracle's entries, layer by layer")
        print("layer   " + "".join(f"{name:>8}" for name in READERS))
        for layer in range(layers):
            row = [report["real"][name][budget]["recall_per_layer"][layer] for name in READERS]
            print(f"{layer:>5}   " + "".join(f"{value:>8.2f}" for value in row))
        for kind in ("real", "random", "correlated"):
            for what in ("recall", "mass"):
                row = [report[kind][name][budget][what] for name in READERS]
                print(f"{kind:>10} {what:<6}" + " ".join(f"{value:>7.3f}" for value in row))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

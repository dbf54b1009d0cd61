"""A trial of Attention Matching (arXiv 2602.16284): is it at 5% nearer to full KV than KVzip at 25%?

    python benchmarks/answers/attention_matching.py MODEL [--length 2048] [--samples 6] [--tasks ruler_vt,...]
        [--settings "kvzip@25%,kvzip@5%,matching@5%,..."] [--out FILE]

The question is hidden: contexts are compacted before it is known. A context is compacted while the model repeats it, as
KVzip does it (one chunk), layer by layer: each layer's queries have gone through compacted layers below it. Per layer
and KV head, with the attention probabilities P [queries, entries] of all query heads of its group on the context:

- keys: the entries with the largest root mean square of P over queries;
- biases: log w, where w in [e^-3, e^3] minimizes |P[:, keys] w - 1|^2, so that the mass of attention is kept;
- values: least squares of the attention output, with the weights P[:, keys] w over their sum (ridge 1e-4 of the mean
  diagonal, towards the values of the chosen entries).

"keys" stops after the first step, "biases" after the second. Every head keeps the same number. Printed: the mean KL of
full KV's next-token distributions over its own greedy answer, how often the likeliest token is the same, and the task's
score. Every setting reads the same answer tokens. The result is written after every prompt; prompts that it has are not
run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from kvsieve.hf.attach import attach
from kvsieve.lab.tasks import all_tasks
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.methods.kvzip import repeat_requests
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table
from kvsieve.shared.prompt import after_prompt, answer_logits, read_alone

TASKS = "ruler_niah_single_2,ruler_niah_multikey_1,ruler_niah_multivalue,ruler_vt,ruler_cwe,ruler_qa_1"
SETTINGS = "kvzip@25%,kvzip@5%,keys@5%,biases@5%,matching@5%,matching@10%,matching@25%"
LARGEST = 3.0
RIDGE = 1e-4
NAME = "kvsieve_compacted"


@dataclass
class Compaction:
    """What the attention of a pass does with a context's entries.

    Attributes:
        kept: entries per head; 0 for full attention.
        steps: "keys", "biases" or "matching".
        fits: True in the pass that compacts.
        biases: [H, t] of each compacted layer.
        size: entries of the context.
    """

    kept: int = 0
    steps: str = "matching"
    fits: bool = False
    size: int = 0
    biases: dict[int, Tensor] = field(default_factory=dict)
    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, module: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return the output [1, Hq, L, D]."""
        layer, new = module.layer_idx, query.shape[2]
        if self.fits:
            context = keys[:, :, : self.size], values[:, :, : self.size]
            self.entries[layer], self.biases[layer] = compacted(query, *context, scale, self.kept, self.steps)
            ours = self.entries[layer]
            keys = torch.cat([ours[0], keys[:, :, self.size :]], 2)
            values = torch.cat([ours[1], values[:, :, self.size :]], 2)
        stored = keys.shape[2]
        mask = torch.zeros(keys.shape[1], 1, stored, dtype=torch.float32)
        if layer in self.biases:
            mask[:, 0, : self.kept] = self.biases[layer]
        future = torch.ones(new, stored, dtype=torch.bool).triu(stored - new + 1)
        mask = mask.masked_fill(future, -torch.inf).repeat_interleave(query.shape[1] // keys.shape[1], 0)
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask[None].to(query.dtype), scale=scale, enable_gqa=True
        )


def compacted(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, kept: int, steps: str
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return keys and values [1, H, t, D] that stand for a context, and their biases [H, t]."""
    heads = keys.shape[1]
    found = []
    for head, queries in enumerate(query[0].float().unflatten(0, (heads, -1)).flatten(1, 2)):
        probabilities = (queries @ keys[0, head].float().T * scale).softmax(-1)
        chosen = probabilities.square().mean(0).topk(kept).indices.sort().values
        columns = probabilities[:, chosen].double()
        own = values[0, head].double()
        weights = torch.ones(kept, dtype=torch.float64)
        if steps != "keys":
            weights = bounded_least_squares(columns)
        fitted = own[chosen]
        if steps == "matching":
            mixed = columns * weights
            mixed = mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-12)
            square = mixed.T @ mixed
            ridge = RIDGE * square.diagonal().mean()
            rest = mixed.T @ (probabilities.double() @ own - mixed @ fitted)
            fitted = fitted + torch.linalg.solve(square + ridge * torch.eye(kept, dtype=torch.float64), rest)
        found.append((keys[0, head, chosen], fitted.to(values.dtype), weights.log().float()))
    new_keys, new_values, biases = (torch.stack(parts) for parts in zip(*found, strict=True))
    return (new_keys[None], new_values[None]), biases


def bounded_least_squares(columns: Tensor, rounds: int = 300) -> Tensor:
    """Return w [t] within [e^-3, e^3] that minimizes |columns w - 1|^2, by accelerated projected gradients."""
    square = columns.T @ columns
    wanted = columns.sum(0)
    step = 1 / torch.linalg.matrix_norm(square, 2)
    low, high = torch.tensor([-LARGEST, LARGEST], dtype=square.dtype).exp()
    weights = torch.ones_like(wanted)
    ahead, pace = weights, 1.0
    for _ in range(rounds):
        moved = (ahead - step * (square @ ahead - wanted)).clamp(low, high)
        following = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = moved + (pace - 1) / following * (moved - weights)
        weights, pace = moved, following
    return weights


STATE = Compaction()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return STATE.attend(module, query, key, value, scaling).transpose(1, 2), None


class Plain:
    """A conversation read by transformers with the attention above."""

    def __init__(self, model: Any, context: Tensor) -> None:
        self.model = model
        self.seen = context.shape[1]
        self.cache = DynamicCache(config=model.config)
        self._feed(context)

    def _feed(self, ids: Tensor, at: int = 0) -> Tensor:
        positions = torch.arange(at, at + ids.shape[1])[None]
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True)
        return out.logits.float()

    def compact(self, request: Tensor, context: Tensor, kept: int, steps: str) -> float:
        """Compact the context while the model repeats it; return the seconds that it took."""
        global STATE
        began = time.perf_counter()
        STATE = Compaction(kept, steps, True, self.seen)
        self._feed(torch.cat([request, context], 1), self.seen)
        STATE.fits = False
        for index, (keys, values) in STATE.entries.items():
            self.cache.layers[index].keys, self.cache.layers[index].values = keys, values
        self.end = self.seen
        return time.perf_counter() - began

    def answer(self, question: Tensor, answer: Tensor) -> Tensor:
        """Return the logits [T, V] before each token of an answer, and forget question and answer again."""
        lengths = [layer.keys.shape[2] for layer in self.cache.layers]
        logits = self._feed(torch.cat([question, answer[:, :-1]], 1), self.seen)[0, question.shape[1] - 1 :]
        for layer, length in zip(self.cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return logits

    def generate(self, question: Tensor, limit: int, stops: set[int]) -> list[int]:
        tokens: list[int] = []
        ids, at = question, self.seen
        while len(tokens) < limit and not (tokens and tokens[-1] in stops):
            tokens.append(int(self._feed(ids, at)[0, -1].argmax()))
            at += ids.shape[1]
            ids = torch.tensor([[tokens[-1]]])
        return tokens


def sieved(
    model: Any, plan: Any, context: Tensor, question: Tensor, answer: Tensor, limit: int, stops: set[int]
) -> tuple[Tensor, list[int]]:
    """Return the logits before each token of an answer and the greedy answer under a plan of kvsieve."""
    cache, _, _ = read_alone(model, plan, context)
    with attach(model, after_prompt(plan)) as sieve, torch.no_grad():
        copy = sieve.adopt(cache.fork())
        logits = answer_logits(sieve, copy, torch.cat([question, answer[:, :-1]], 1))[0, question.shape[1] - 1 :]
        copy = sieve.adopt(cache.fork())
        tokens: list[int] = []
        ids = question
        while len(tokens) < limit and not (tokens and tokens[-1] in stops):
            tokens.append(int(answer_logits(sieve, copy, ids)[0, -1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
    return logits.float(), tokens


@torch.no_grad()
def measured(model: Any, plain: Any, prompter: Prompter, task: Any, at: int, given: Any) -> dict[str, Any]:
    """Return the row of one prompt: distances and scores by setting."""
    global STATE
    STATE = Compaction()
    sample = task.sample(at, given.length, 0, prompter.count)
    turn, ids = sample.turns[0], prompter.encode(sample)
    stops, limit = set(prompter.stops), turn.max_new_tokens
    requests = repeat_requests(prompter.tokenizer)
    request = torch.tensor([[*requests["repeat_ids"], *requests["answer_ids"]]])
    tokens = Plain(plain, ids.context).generate(ids.question, limit, stops)
    answer = torch.tensor([tokens])
    STATE = Compaction()
    wanted = Plain(plain, ids.context).answer(ids.question, answer).log_softmax(-1)
    row: dict[str, Any] = {"task": task.name, "sample": at, "tokens": ids.prompt.shape[1], "settings": {}}
    row["full"] = turn.score(prompter.answer(tokens)[0], turn.answers)["score"]
    for setting in given.settings.split(","):
        name, _, share = setting.partition("@")
        seconds = 0.0
        STATE = Compaction()
        if name in ("keys", "biases", "matching"):
            kept = round(float(share.rstrip("%")) / 100 * ids.context.shape[1])
            chat = Plain(plain, ids.context)
            seconds = chat.compact(request, ids.context, kept, name)
            logits, said = chat.answer(ids.question, answer), chat.generate(ids.question, limit, stops)
        else:
            plan = plan_without_floor(name, budget=share, **(requests if name == "kvzip" else {}))
            logits, said = sieved(model, plan, ids.context, ids.question, answer, limit, stops)
        found = logits.log_softmax(-1)
        row["settings"][setting] = {
            "kl": float((wanted.exp() * (wanted - found)).sum(-1).mean()),
            "same": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
            "score": turn.score(prompter.answer(said)[0], turn.answers)["score"],
            "seconds": seconds,
        }
    return row


def table(rows: list[dict[str, Any]], settings: list[str]) -> str:
    lines = [["full", "0", "1", f"{mean(row['full'] for row in rows):.3f}", ""]]
    for setting in settings:
        found = [row["settings"][setting] for row in rows if setting in row["settings"]]
        if found:
            numbers = {name: mean(one[name] for one in found) for name in found[0]}
            lines.append([setting, f"{numbers['kl']:.3f}", f"{numbers['same']:.3f}", f"{numbers['score']:.3f}"])
            lines[-1].append(f"{numbers['seconds']:.1f}" if numbers["seconds"] else "")
    return markdown_table(["setting", "KL", "same token", "score", "seconds to compact"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="checkpoint")
    parser.add_argument("--length", type=int, default=2048, help="prompt tokens (default: 2048)")
    parser.add_argument("--samples", type=int, default=6, help="prompts per task (default: 6)")
    parser.add_argument("--tasks", default=TASKS, help=f"generated tasks (default: {TASKS})")
    parser.add_argument("--settings", default=SETTINGS, help=f"(default: {SETTINGS})")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: none)")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model, dtype=torch.bfloat16)
    AttentionInterface.register(NAME, attention)
    plain, _ = kvsieve.models.load(given.model, dtype=torch.bfloat16)
    plain.set_attn_implementation(NAME)
    prompter = Prompter(tokenizer, model.generation_config.eos_token_id)
    tasks = all_tasks()
    rows = json.loads(given.out.read_text())["rows"] if given.out and given.out.exists() else []
    for at in range(given.samples):
        for name in given.tasks.split(","):
            if any((row["task"], row["sample"]) == (name, at) for row in rows):
                continue
            rows.append(measured(model, plain, prompter, tasks[name], at, given))
            print(name, at, {key: round(one["kl"], 3) for key, one in rows[-1]["settings"].items()}, flush=True)
            if given.out:
                write_result(given.out, {"environment": environment(model), "length": given.length, "rows": rows})
    print(table(rows, given.settings.split(",")))


if __name__ == "__main__":
    main()

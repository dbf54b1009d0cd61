"""A method of your own in one file, beside two that are there: SnapKV's votes, weighed by the size of the values.

    python examples/own_method.py [--model MODEL]

The idea is VATP's (arXiv 2406.12335): an entry matters as much as it is attended to times what it then puts out.
docs/add_a_method.md explains what a method may do, and how a package of your own offers one.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import kvsieve
from kvsieve.methods import SnapKV
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class Weighed(SnapKV):
    """Keep the entries whose attention from the prompt's end, times the L1 norm of their values, is greatest."""

    def context_scores(self, ctx: LayerContext) -> Tensor:
        votes = super().context_scores(ctx)  # [B, H, M], of the M entries before the observing queries' own
        return votes * ctx.values[:, :, : votes.shape[-1]].float().norm(p=1, dim=-1)


@kvsieve.register_method("weighed", title="Weighed votes", paper="2406.12335", phase="end of prompt", query_aware=True)
def weighed(budget: str | int | float = "20%", window: int = 16, kernel: int = 21) -> kvsieve.Plan:
    """Votes of the prompt's end, times the values' norms."""
    return kvsieve.Plan(evict=Weighed(budget=kvsieve.Budget.parse(budget), window=window, kernel=kernel))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
document = (Path(__file__).parent / "minutes.txt").read_text(encoding="utf-8")
chat = [{"role": "user", "content": f"{document}\n\nWhen is the next meeting?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
for name in ("weighed", "snapkv", "knorm"):
    with kvsieve.attach(model, kvsieve.plan(name, budget="25%"), tokenizer=tokenizer) as sieve:
        result = sieve.generate(prompt, max_new_tokens=40, do_sample=False)
    print(f"{name}: {tokenizer.decode(result.sequences[0, result.stats.prompt_tokens :], skip_special_tokens=True)}")

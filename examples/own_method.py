"""A method of your own in one file, beside two that are there: SnapKV's votes, weighed by the size of the values.

    python examples/own_method.py [--model MODEL]

The idea is VATP's (arXiv 2406.12335): an entry matters as much as it is attended to times what it then puts out.
Window and kernel are SnapKV's, so they come with the model as SnapKV's do, and the two are compared fairly.
docs/add_a_method.md explains what a method may do, and how a package of your own offers one.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import kvsieve
from kvsieve.methods import SnapKV
from kvsieve.types import LayerContext


@kvsieve.register_method(
    "weighed", title="Weighed votes", paper="2406.12335", phase="end of prompt", query_aware=True, budget="20%"
)
@dataclass(frozen=True, kw_only=True)
class Weighed(SnapKV, heads="own", query_aware=True):
    """Keep the entries whose attention from the prompt's end, times the L1 norm of their values, is greatest."""

    def context_scores(self, ctx: LayerContext) -> Tensor:
        votes = super().context_scores(ctx)  # [B, H, M], of the M entries before the observing queries' own
        return votes * ctx.values[:, :, : votes.shape[-1]].float().norm(p=1, dim=-1)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
document = (Path(__file__).parent / "minutes.txt").read_text(encoding="utf-8")
chat = [{"role": "user", "content": f"{document}\n\nWhat is the number of the order of the new radio?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
# KNorm does not look at the question, and keeps too little of what answers it.
for name in ("full", "weighed", "snapkv", "knorm"):
    budget = {} if name == "full" else {"budget": "25%"}
    with kvsieve.attach(model, kvsieve.plan(name, **budget), tokenizer=tokenizer) as sieve:
        result = sieve.generate(prompt, max_new_tokens=40, do_sample=False)
    print(f"{name}: {tokenizer.decode(result.sequences[0, result.stats.prompt_tokens :], skip_special_tokens=True)}")

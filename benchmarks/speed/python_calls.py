"""Count the functions that one decoded token enters in Python, and those of C that Python calls, by plan.

    python benchmarks/speed/python_calls.py [--model DIRECTORY] [--length 300] [--tokens 20]
        [--decode auto] [--plans "full;snapkv:budget=10%;adakv:budget=10%;kivi"]

Counts do not depend on how busy a machine is, as times do. The first tokens of an answer do not count: they show what
executors layers have, and make copies of weights. Calls within C, such as those of `map`, are not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from reading_cost import spec

import kvsieve

PLANS = "full;snapkv:budget=10%;adakv:budget=10%;kivi"


def calls_per_token(sieve: Any, ids: torch.Tensor, tokens: int) -> tuple[dict[str, float], Counter[str]]:
    """Return calls per token of an answer, and the functions of Python entered most often in all."""
    cache = sieve.prefill(ids)
    found: Counter[str] = Counter()
    entered: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        found[event] += 1
        if event == "call":
            entered[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    for number in range(2 * tokens):
        token = ids[:, number : number + 1]
        if number == tokens:
            sys.setprofile(note)
        sieve.feed(cache, token, None, logits=1)
    sys.setprofile(None)
    counts = {"python": found["call"] / tokens, "c": found["c_call"] / tokens}
    return counts | {"all": sum(counts.values())}, entered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a model (default: the demo model)")
    parser.add_argument("--length", type=int, default=300, help="tokens of the prompt (default 300)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens counted, after as many others (default 20)")
    parser.add_argument("--decode", default="auto", help="decode engine (default auto)")
    parser.add_argument("--plans", default=PLANS, help="plans, divided by semicolons")
    parser.add_argument("--most", type=int, default=0, help="functions to list, by calls (default 0)")
    options = parser.parse_args()
    model = (kvsieve.models.load(options.model) if options.model else kvsieve.models.load_demo())[0]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 20000, (1, options.length), generator=draw)
    for text in options.plans.split(";"):
        with kvsieve.attach(model, spec(text), decode=options.decode) as sieve:
            counts, entered = calls_per_token(sieve, ids, options.tokens)
        print(f"{text:24}", {name: round(count) for name, count in counts.items()})
        for name, count in entered.most_common(options.most):
            print(f"    {count / options.tokens:7.1f} {name}")


if __name__ == "__main__":
    main()

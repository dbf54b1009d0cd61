"""Time to the first token of a hybrid model under eviction and propagation, beside its own full run.

    python benchmarks/hybrid.py [--tokens 7500] [--rounds 5] [--dtype auto] [--small] [--out FILE]

The model has the geometry of Qwen3.5-0.8B, three recurrent layers (gated delta rule) to each layer of full attention,
and random weights: times do not depend on what they are, answers would. All contenders take turns on the same model
object and the same prompt, starting with another one each round; told are medians of the rounds and of the ratios
within a round. The tokens of a random model's prompt are as good as any, so the prompt is random, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvsieve
from kvsieve.bench.contenders import KvsieveMethod, Transformers
from kvsieve.bench.prompts import TokensPrompt
from kvsieve.devices import auto_dtype
from kvsieve.hf.kinds import layer_kinds, told_kinds
from kvsieve.report.environment import environment

FULL, BASE = "kvsieve, full KV", "transformers"
GEOMETRY: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
SMALL = GEOMETRY | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}


def measure(model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of each contender, and how they stand to full KV within each round."""
    layers = model.config.num_hidden_layers
    ids = torch.randint(100, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    plans = {
        FULL: kvsieve.plan("full"),
        "snapkv, 10%": kvsieve.plan("snapkv", budget="10%", paper=True),
        "fastkv, middle layer, 20%": kvsieve.plan("fastkv", tsp_layer=layers // 2 - 1, tsp_rate=0.2, paper=True),
    }
    contenders: dict[str, Any] = {BASE: Transformers(model)}
    contenders |= {name: KvsieveMethod(model, plan, name, None) for name, plan in plans.items()}
    prompt, load = TokensPrompt(ids), []
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        names = list(contenders)
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            seconds = contenders[name].run(prompt, 2)["ttft_s"]
            print(f"round {turn}, {name}: {seconds:.2f} s", flush=True)
            if turn:
                spent[name].append(seconds)
                load.append(os.getloadavg()[0])
    ratios = {
        name: {
            to: round(statistics.median(a / b for a, b in zip(runs, spent[to], strict=True)), 3) for to in (FULL, BASE)
        }
        for name, runs in spent.items()
    }
    return {
        "ttft_s": {name: round(statistics.median(runs), 3) for name, runs in spent.items()},
        "ratio_to": ratios,
        "all_s": {name: [round(each, 3) for each in runs] for name, runs in spent.items()},
        "load_average": round(statistics.median(load), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hybrid.json")
    given = parser.parse_args()
    dtype = auto_dtype("cpu").name if given.dtype == "auto" else given.dtype
    config = AutoConfig.for_model("qwen3_5_text", **(SMALL if given.small else GEOMETRY))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    report = {
        "environment": environment(),
        "geometry": SMALL if given.small else GEOMETRY,
        "layers": told_kinds(layer_kinds(config)),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": dtype,
        "prompt_tokens": given.tokens,
        "rounds": given.rounds,
        **measure(model, given.tokens, given.rounds),
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("ttft_s", "ratio_to")}, indent=1))


if __name__ == "__main__":
    main()

"""The layers in which the toys find an answer.

    python -m benchmarks.toys.where DIR [--toys hybrid,hybrid_early,sinks,latent] [--results FOLDER]

DIR is what benchmarks.toys.train wrote; FOLDER, benchmarks/results otherwise, gets toys_where.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.toys.train import RESULTS, STAGES
from kvsieve.report.environment import environment, write_result


@torch.no_grad()
def answer_mass(model: PreTrainedModel, prompts: Tensor) -> dict[str, float]:
    """Per layer with attention, the weight that the question's key has on the first token of its answer.

    Mean over prompts, of the head with most; the layer where it is high is where the toy finds the answer.
    """
    places = (prompts[:, :-1] == prompts[:, -1:]).int().argmax(1) + 1
    found: dict[str, float] = {}

    def note(index: int, weights: Tensor) -> None:
        mass = weights[:, :, -1].gather(2, places[:, None, None].expand(-1, weights.shape[1], 1))
        found[str(index)] = round(mass.mean(0).max().item(), 4)

    attending = {i: layer.self_attn for i, layer in enumerate(model.model.layers) if "self_attn" in layer._modules}
    handles = [
        module.register_forward_hook(lambda module, given, out, index=index: note(index, out[1]))
        for index, module in attending.items()
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model.model(prompts, use_cache=False)
    model.set_attn_implementation(before)
    for handle in handles:
        handle.remove()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--toys", default="hybrid,hybrid_early,sinks,latent")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = STAGES[-1].one_question()
    prompts = task.sample(64, torch.Generator().manual_seed(2))[:, : -task.value]
    found = {}
    for toy in given.toys.split(","):
        model = AutoModelForCausalLM.from_pretrained(given.folder / toy, dtype=torch.float32).eval()
        found[toy] = answer_mass(model, prompts)
        print(toy, found[toy])
    report = {"environment": environment(), "prompts": len(prompts), "answer_mass": found}
    write_result(given.results / "toys_where.json", report)


if __name__ == "__main__":
    main()

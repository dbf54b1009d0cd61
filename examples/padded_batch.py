"""Answer prompts of different lengths in one padded batch: each row keeps and answers what it would alone.

python examples/padded_batch.py [--model MODEL]
"""

import argparse
from pathlib import Path

import torch

import kvsieve

SECTIONS = (Path(__file__).parent / "minutes.txt").read_text(encoding="utf-8").split("\n\n")
PROMPTS = (
    "\n\n".join(SECTIONS[11:17]) + "\n\nWhat is the number of the order of the new radio?",
    "\n\n".join(SECTIONS[2:4]) + "\n\nWhat did the dredger lose in the storm?",
    "What is the capital of France?",
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
given = parser.parse_args()

# In bfloat16 rounding depends on the shape of the batch, and a close choice between two tokens may differ.
model, tokenizer = kvsieve.models.load(given.model, dtype=torch.float32)  # the tokenizer pads on the left
chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
batch = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
width = batch["input_ids"].shape[1]
# A number of entries leaves short prompts whole; a share of 37 tokens would be too few to answer from.
for plan in (kvsieve.plan("full"), kvsieve.plan("snapkv", budget=200)):
    with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve:
        together = sieve.generate(batch, max_new_tokens=40, do_sample=False)
        print(f"{plan.name}: {together.stats.kv_entries[0]} entries kept at most")
        for row, chat in enumerate(chats):
            answer = tokenizer.decode(together.sequences[row, width:], skip_special_tokens=True)
            print(f"    {int(batch['attention_mask'][row].sum())} tokens: {answer}")
            alone = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            single = sieve.generate(alone, max_new_tokens=40, do_sample=False)
            own = tokenizer.decode(single.sequences[0, single.stats.prompt_tokens :], skip_special_tokens=True)
            print(f"        alone: {'the same' if own == answer else 'another'} answer")

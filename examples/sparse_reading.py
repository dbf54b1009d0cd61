"""Read little of a long cache: RocketKV evicts, then every new token reads only 512 entries per layer and head.

python examples/sparse_reading.py [--model MODEL] [--document FILE] [--question TEXT]
"""

import argparse
from pathlib import Path

import kvsieve

MINUTES = Path(__file__).parent / "minutes.txt"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
parser.add_argument("--document", type=Path, default=MINUTES, help="a text file")
parser.add_argument("--question", default="What is the number of the order of the new radio?")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
document = given.document.read_text(encoding="utf-8")
chat = [{"role": "user", "content": f"{document}\n\n{given.question}"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

# "rocketkv-mt", for conversations, evicts nothing and reads as little.
for name, parameters in (("full", {}), ("rocketkv", {"budget": 512}), ("rocketkv-mt", {"budget": 512})):
    with kvsieve.attach(model, kvsieve.plan(name, **parameters), tokenizer=tokenizer) as sieve:
        result = sieve.generate(prompt, max_new_tokens=40, do_sample=False)
    stats = result.stats
    print(f"{name}: {tokenizer.decode(result.sequences[0, stats.prompt_tokens :], skip_special_tokens=True)}")
    print(f"    {max(stats.kv_entries)} of {stats.prompt_tokens} entries stored per layer and head")
    if stats.traffic is not None:  # what each token after the first one read
        chosen_by = stats.traffic.estimate_entries + stats.traffic.upkeep_entries
        print(f"    {stats.traffic.entries:.0f} read per token, and the bytes of {chosen_by:.0f} to choose them\n")

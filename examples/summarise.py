"""Summarise a long document with FastKV: 40% of the tokens go through the deep layers, 40% of the entries stay.

python examples/summarise.py [--model MODEL] [--document FILE]

The demo model is small: parts of its summary are invented, under full KV as well. Give a larger one as --model.
"""

import argparse
from pathlib import Path

import kvsieve

MINUTES = Path(__file__).parent / "minutes.txt"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
parser.add_argument("--document", type=Path, default=MINUTES, help="a text file")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
document = given.document.read_text(encoding="utf-8")
chat = [{"role": "user", "content": f"{document}\n\nSummarise the text above in three sentences."}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

for plan in (kvsieve.plan("full"), kvsieve.plan("fastkv", budget="40%", tsp_rate=0.4)):
    # The tokenizer is needed for parameters that are not given: they come with the model (docs/calibrate.md).
    with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve:
        result = sieve.generate(prompt, max_new_tokens=64, do_sample=False)
    stats = result.stats
    print(f"{plan.name}: {tokenizer.decode(result.sequences[0, stats.prompt_tokens :], skip_special_tokens=True)}")
    print(
        f"    {stats.prompt_tokens} prompt tokens, {stats.deep_tokens} of them through the last layer; "
        f"{max(stats.kv_entries)} entries kept per layer and head; "
        f"{stats.ttft_s:.2f} s to the first token, KV cache {stats.kv_bytes / 2**20:.1f} MiB\n"
    )

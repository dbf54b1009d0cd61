"""A long chat whose cache does not grow: LagKV evicts at the end of every prompt and while the model answers.

python examples/long_chat.py [--model MODEL] [--max-new-tokens N]
"""

import argparse

import kvsieve

QUESTIONS = (
    "What is the capital of France?",
    "Name three things that one can see there.",
    "Write five sentences about the river that flows through the city.",
    "And what is the capital of Italy?",
    "Write five sentences about its history.",
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
parser.add_argument("--max-new-tokens", type=int, default=120, help="of each answer")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)
# 128 entries per layer and head after every turn. LagKV compares each partition of `lag` tokens with the next one.
plans = {"full": kvsieve.plan("full"), "lagkv": kvsieve.plan("lagkv", budget=128, lag=32)}
for name, plan in plans.items():
    with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=given.max_new_tokens)
        for question in QUESTIONS:
            print(f"{name} > {question}")
            for piece in chat.stream(question):
                print(piece, end="", flush=True)
            stored = max(chat.cache.entries())
            print(f"\n    {chat.ids.shape[1]} tokens so far, at most {stored} entries stored per layer and head\n")

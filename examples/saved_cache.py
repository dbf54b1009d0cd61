"""Read a document once, save its compressed cache to a file, and ask many questions of it in another process.

    python examples/saved_cache.py [--model MODEL] [--document FILE] [--cache FILE]

The second part needs the first one's file only. Run the script twice: the second run reads no document.
"""

import argparse
from pathlib import Path

import kvsieve

MINUTES = Path(__file__).parent / "minutes.txt"
QUESTIONS = (
    "What is the number of the order of the new radio?",
    "What is the name of the dredger?",
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="directory of a checkpoint, or a Hub id; the demo model if left out")
parser.add_argument("--document", type=Path, default=MINUTES, help="a text file")
parser.add_argument("--cache", type=Path, default=Path("minutes.kv"), help="where the cache is saved")
given = parser.parse_args()

model, tokenizer = kvsieve.models.load(given.model)


def ask(chat):
    """Print the answers to all questions, none of which sees the others."""
    read = chat.snapshot()
    for question in QUESTIONS:
        print(f"> {question}\n{chat.ask(question, reduce=False).text}\n")
        chat.rollback(read)


if not given.cache.exists():
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=60)
        chat.read(given.document.read_text(encoding="utf-8"))
        print(f"full KV, {chat.ids.shape[1]} tokens:\n")
        ask(chat)
# The document is compressed before any question is known: KVzip keeps what the model needs to repeat the text.
with kvsieve.attach(model, kvsieve.plan("kvzip", budget="50%"), tokenizer=tokenizer) as sieve:
    if not given.cache.exists():
        chat = sieve.chat(tokenizer)
        chat.read(given.document.read_text(encoding="utf-8"))
        chat.save(given.cache)
        print(f"read {chat.ids.shape[1]} tokens, saved {given.cache.stat().st_size / 2**20:.1f} MiB\n")
    ask(sieve.chat(tokenizer, load=given.cache, max_new_tokens=60))

"""Measure what a store of prompts saves: on documents, on an agent's turns, and in sessions per byte.

    python benchmarks/speed/store.py document [--method full] [--tokens 7500] [--unbroken | --folder DIR]
    python benchmarks/speed/store.py agent [--turns 100]
    python benchmarks/speed/store.py sessions [--tokens 7500]

document: a process reads a document with a first question, leaves it to a store and is killed (SIGKILL). This process
opens the store and asks a second question about the document. Its prompt is prefilled anew, too: seconds to the
first token of both, and whether the answers are the same. --folder keeps the store of the killed process, so that
several runs need it once. With --unbroken one process asks both questions, with a store in memory.

agent: a conversation of many turns on tiny models, all of it sent again every turn as agents do, with tool outputs;
every tenth turn goes back and edits what was said before. Told is the share of prompt tokens that came from the store.

sessions: bytes that a store takes for one session of a document, question and answer, under full KV and under SnapKV of
10% with entries of 4 bits; of the demo model's first two layers, since all take equally many.

Results go to benchmarks/results/store.json, one entry for each of these.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.turns import render, stop_ids, token_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.store import PrefixStore
from tiny_models import build

RESULTS = Path(__file__).parents[1] / "results" / "store.json"
QUESTIONS = ("What is the text about? Answer in one sentence.", "Name three things that the text explains.")
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"budget": "10%"},
    "rocketkv-mt": {"budget": 512},
    "fastkv": {"budget": "10%"},
}
PACKED = {"budget": "10%", "codec": "kivi:bits=4"}
CHUNK = 1024


def prompts(tokenizer: Any, tokens: int, count: int) -> list[torch.Tensor]:
    """Prompts int64 [1, about `tokens`]: one document, each with another question."""
    document = tokenizer.decode(text_ids(tokenizer)[0, : tokens - 60])
    texts = [f"{document}\n\n{question}" for question in QUESTIONS[:count]]
    return [
        torch.tensor([token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": text}]))]) for text in texts
    ]


def options(model: Any, tokenizer: Any, new_tokens: int) -> dict[str, Any]:
    """Options of generate: greedy answers."""
    ends = sorted(stop_ids(tokenizer, model.generation_config.eos_token_id))
    return {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": ends, "pad_token_id": ends[0]}


def document(given: argparse.Namespace) -> dict[str, Any]:
    """See the module: seconds to the first token of the second question, with and without the store."""
    model, tokenizer = kvsieve.models.load_demo()
    asked, ids = prompts(tokenizer, given.tokens, 2)
    how = {**options(model, tokenizer, 16), "chunk": CHUNK}
    plan = plan_without_floor(given.method, **METHODS[given.method])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(given.folder or folder)
        known = given.unbroken or (place.exists() and any(place.glob("*.kv")))
        first = None if known else fill_and_die(given, str(place))
        store = PrefixStore(memory=given.memory) if given.unbroken else PrefixStore(place, disk=None)
        with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve, store:
            sieve.generate(asked[:, :64], max_new_tokens=2, do_sample=False)
            if given.unbroken:
                first = round(StoredPrefixes(store).generate(sieve, asked, **how).stats.ttft_s, 3)
            before = store.stats()
            found = StoredPrefixes(store).generate(sieve, ids, **how)
            now = store.stats()
            anew = sieve.generate(ids, **how)
    return {
        "method": given.method,
        "dtype": str(model.dtype),
        "tokens": ids.shape[1],
        "from_store": now.tokens_reused - before.tokens_reused,
        "from_disk": now.disk_hits > before.disk_hits,
        "first_ttft_s": first,
        "ttft_s": round(found.stats.ttft_s, 3),
        "anew_ttft_s": round(anew.stats.ttft_s, 3),
        "anew_by": round(anew.stats.ttft_s / found.stats.ttft_s, 1),
        "same_answer": torch.equal(found.sequences, anew.sequences),
        "answer": tokenizer.decode(found.sequences[0, ids.shape[1] :], skip_special_tokens=True),
    }


def fill_and_die(given: argparse.Namespace, folder: str) -> float:
    """Let another process answer the first question and leave it to the store, and kill it; its seconds."""
    command = [sys.executable, __file__, "fill", "--method", given.method, "--tokens", str(given.tokens)]
    child = subprocess.Popen([*command, "--folder", folder], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    report = json.loads(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    return report


def fill(given: argparse.Namespace) -> None:
    """Answer the first question, say so when all is on the disk, and wait to be killed."""
    model, tokenizer = kvsieve.models.load_demo()
    (ids,) = prompts(tokenizer, given.tokens, 1)
    plan = plan_without_floor(given.method, **METHODS[given.method])
    with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve:
        store = PrefixStore(given.folder)
        result = StoredPrefixes(store).generate(sieve, ids, chunk=CHUNK, **options(model, tokenizer, 16))
        assert store.flush()
        print(json.dumps(round(result.stats.ttft_s, 3)), flush=True)
        signal.pause()


def agent(given: argparse.Namespace) -> dict[str, Any]:
    """See the module: shares of an agent's prompt tokens that came from the store, on tiny models."""
    cases = {
        "full KV": ("llama", "full", {}),
        "recurrent hybrid": ("qwen3_next", "full", {}),
        "SnapKV, 512 entries": ("llama", "snapkv", {"budget": 512, "window": 16, "paper": True}),
    }
    out = {}
    for name, (family, method, parameters) in cases.items():
        model = build(family, max_position_embeddings=1 << 16)
        with (
            kvsieve.attach(model, plan_without_floor(method, **parameters)) as sieve,
            PrefixStore(memory=given.memory) as store,
        ):
            out[name] = {"family": family, "method": method, **trace(sieve, store, given.turns)}
    return out


def trace(sieve: Any, store: PrefixStore, turns: int) -> dict[str, Any]:
    """Play an agent's conversation; every prompt begins with what the store has of it."""
    made = torch.Generator().manual_seed(7)

    def said(least: int, most: int) -> torch.Tensor:
        size = int(torch.randint(least, most, (1,), generator=made))
        return torch.randint(2, 100, (1, size), generator=made)

    how = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "chunk": 256}
    ids, ends, marks = said(600, 601), [], []
    for turn in range(turns):
        if turn % 10 == 9:
            # Goes back three turns, and says something else there.
            ids, ends = marks[-3]
            del marks[-3:]
        marks.append((ids, ends))
        # A tool's output, now and then a long one.
        ids = torch.cat([ids, said(300, 600) if turn % 7 == 3 else said(20, 120)], 1)
        ends = [*ends, ids.shape[1]]
        cache = sieve.new_cache()
        found = store.find(sieve, ids[0], turns=ends)
        if found is not None:
            cache = found.cache
        result = sieve.generate(ids, torch.ones_like(ids), cache=cache, **how)
        store.add(sieve, result.sequences[0], result.cache, 0.001 * ids.shape[1], turns=ends)
        ids = result.sequences
    stats = store.stats()
    report = ("nodes", "memory_bytes", "hits", "misses", "evictions", "tokens_asked", "tokens_reused")
    share = round(stats.tokens_reused / stats.tokens_asked, 4)
    return {"share": share, "last_prompt_tokens": ends[-1], **{name: stats.to_dict()[name] for name in report}}


def sessions(given: argparse.Namespace) -> dict[str, Any]:
    """See the module: bytes of a session in memory."""
    model, tokenizer = kvsieve.models.load_demo()
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    (ids,) = prompts(tokenizer, given.tokens, 1)
    out: dict[str, Any] = {"tokens": ids.shape[1]}
    for name, plan in (
        ("full", plan_without_floor("full")),
        ("snapkv 10%, kivi 4 bits", plan_without_floor("snapkv", paper=True, **PACKED)),
    ):
        with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve, PrefixStore() as store:
            result = sieve.generate(ids, chunk=CHUNK, **options(model, tokenizer, 16))
            store.add(sieve, result.sequences[0], result.cache, 1.0)
            out[name] = {"bytes_of_2_layers": store.stats().memory_bytes, "entries": result.cache.entries()[0]}
    one, other = (out[name]["bytes_of_2_layers"] for name in ("full", "snapkv 10%, kivi 4 bits"))
    return {**out, "sessions_in_the_memory_of_one": round(one / other, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("document", "agent", "sessions", "fill"))
    parser.add_argument("--method", choices=METHODS, default="full")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--unbroken", action="store_true", help="both questions in one process")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--folder", help="of the store, kept; a new one if left out")
    given = parser.parse_args()
    if given.what == "fill":
        fill(given)
        return
    found = {"document": document, "agent": agent, "sessions": sessions}[given.what](given)
    print(json.dumps(found, indent=1))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    where = "from memory" if given.unbroken else "from the disk, after a kill"
    key = f"document, {given.method}, {where}" if given.what == "document" else given.what
    known[key] = {"environment": environment(), **found}
    write_result(RESULTS, known)


if __name__ == "__main__":
    main()

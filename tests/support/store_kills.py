"""Kill a process with SIGKILL while it writes to a store, and look at what it has left.

    python tests/support/store_kills.py [--kills 200] [--out benchmarks/results/store_kills.json]

Each time a child process reads random prompts with a tiny model, adds them to a store and tells its parent of each that
is on the disk. It is killed at a random moment. Then the store is opened again: every reported node must be found, no
file may be damaged, and what is found must be what was read. Needs a system with fork (not Windows).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch

import kvsieve
from kvsieve.hf.attach import Sieve
from kvsieve.report.environment import environment, write_result
from kvsieve.store import PrefixStore
from tiny_models import build

PLANS = {"full": {}, "snapkv": {"budget": 30, "window": 4, "paper": True}}
TOKENS = 90


def prompt(seed: int) -> torch.Tensor:
    """int64 [1, TOKENS] of a number."""
    return torch.randint(2, 120, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def read(sieve: Sieve, seed: int) -> kvsieve.SieveCache:
    """Read a prompt whole."""
    return sieve.prefill(prompt(seed), chunk=32)


def write_until_killed(sieve: Sieve, path: Path, first: int, reported: int) -> None:
    """Add one conversation after another, and tell the number of each that is on the disk, and the turns that it has.

    Args:
        sieve: the attached model.
        path: of the store.
        first: number of the first conversation.
        reported: descriptor of a pipe to the parent.
    """
    store = PrefixStore(path)
    for seed in range(first, first + 10_000):
        ids, cache = prompt(seed), read(sieve, seed)
        for turn in range(2):
            if turn:
                ids = torch.cat([ids, prompt(seed + 1)[:, :20]], 1)
                sieve.prefill(ids, cache=cache)
            store.add(sieve, ids[0], cache, 1.0, turns=(TOKENS, TOKENS + 20)[: turn + 1])
            if store.flush():
                os.write(reported, f"{seed} {turn}\n".encode())


def kill_once(sieve: Sieve, path: Path, first: int, wait: float) -> list[tuple[int, int]]:
    """Let a child write, kill it, and return its reports: numbers of conversations, and of their turns.

    Args:
        sieve: the attached model.
        path: of the store.
        first: number of the first conversation.
        wait: seconds from the first that is on the disk to the kill.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            write_until_killed(sieve, path, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        reported = [lines.readline()]
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported += [line for line in lines if line.endswith("\n")]
    found = [line.split() for line in reported if line.strip()]
    return [(int(seed), int(turn)) for seed, turn in found]


def check(sieve: Sieve, path: Path, reported: list[tuple[int, int]]) -> dict[str, int]:
    """Open a store after a kill; count the reported nodes, those that are lost, and what is damaged or wrong."""
    counts = {"finished": len(reported), "lost": 0, "damaged": 0, "wrong": 0}
    with PrefixStore(path, memory=0) as store:
        store.verify()
        counts["damaged"] = store.stats().damaged
        for number, (seed, turn) in enumerate(reported):
            ids = torch.cat([prompt(seed), prompt(seed + 1)[:, :20]][: turn + 1], 1)
            ends = (TOKENS, TOKENS + 20)[: turn + 1]
            longer = torch.cat([ids, prompt(seed + 2)[:, :9]], 1)
            found = store.find(sieve, longer[0], turns=(*ends, longer.shape[1]))
            if found is None or found.tokens < ids.shape[1]:
                counts["lost"] += 1
            elif number == len(reported) - 1:
                fresh = read(sieve, seed)
                if turn:
                    sieve.prefill(ids, cache=fresh)
                counts["wrong"] += logits(sieve, longer, found.cache) != logits(sieve, longer, fresh)
    return counts


def logits(sieve: Sieve, ids: torch.Tensor, cache: kvsieve.SieveCache) -> list[float]:
    """Logits of the first token after a prompt."""
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    result = sieve.generate(ids, cache=cache, return_dict_in_generate=True, output_logits=True, **options)
    return result.output.logits[0][0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, chance = build("llama"), random.Random(7)
    total = {"kills": 0, "finished": 0, "lost": 0, "damaged": 0, "wrong": 0, "unfinished files": 0}
    for number in range(given.kills):
        if number % 20 == 0:
            folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "store"
        name = ("full", "snapkv")[number % 2]
        with kvsieve.attach(model, kvsieve.plan(name, **PLANS[name])) as sieve:
            reported = kill_once(sieve, path, 100_000 * number, chance.uniform(0, 0.15))
            total["unfinished files"] += len([*path.glob(".*.kvsieve-tmp")])
            for each, count in check(sieve, path, reported).items():
                total[each] += count
        total["kills"] += 1
    result = {"environment": environment(), "result": total}
    print(json.dumps(total))
    if given.out is not None:
        write_result(given.out, result)
    if total["lost"] or total["damaged"] or total["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

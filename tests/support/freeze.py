"""Every method's behaviour on a tiny model, recorded, so that a change of the code's form can show that it kept it.

    python tests/support/freeze.py --compare tests/data/frozen.json.gz [--methods snapkv,fastkv]
    python tests/support/freeze.py --write tests/data/frozen.json.gz [--methods snapkv,fastkv]

For every registered method and each of CASES (one shot, in chunks, a padded batch, two turns, ...) the record holds the
kept tokens per row, layer and head, the generated tokens, some of their logits, a few statistics, and, where the case
is refused, the class of the error. `--compare` prints each case that differs, with how, and exits 1. A change that is
meant to alter behaviour says which cases differ, and writes the record again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvsieve
from small import fill, plan_of, recorder_stand_in, stored
from tiny_models import build

Record = dict[str, Any]

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Tokens that the rows bring to each turn: the longer ones' prompt fits no budget, the shorter rows are left-padded.
ONE, BATCH, TALK = ((56,),), ((56, 47),), ((56, 47), (20, 13))
SPANS, QUOTAS = [(0, 2), (20, 23)], [((5, 20), 5)]
# With room for what is held, and bases that need little room of their own.
ROOMY = {"budget": "55%", "base": "knorm"}
# Every so many logits are recorded; what changes a hidden state changes them all.
STRIDE, DIGITS, TOLERANCE = 16, 5, 1e-4
# Methods that take no share of the prompt as budget.
OWN = {"asl": {"budget": 24}}


@dataclass(frozen=True)
class Case:
    """One way to run a method.

    Attributes:
        turns: true tokens that each row brings, per turn.
        plan: parameters of the method, where it takes them.
        read: options of `prefill` and `generate`.
        options: options of `generate` alone; with any, nothing is prefilled.
        new: tokens generated per turn.
        decode: how, as `attach` takes it; "graph" runs with a stand-in for recorded passes.
    """

    turns: tuple[tuple[int, ...], ...] = BATCH
    plan: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    new: int = 4
    decode: str = "eager"


CASES = {
    "one shot": Case(ONE),
    "chunks": Case(ONE, read={"chunk": 16}),
    "padded": Case(),
    "padded, chunks": Case(read={"chunk": 16}),
    "two turns": Case(TALK),
    "two turns, every=4": Case(TALK, plan={"every": 4}, new=9),
    "protect": Case(TALK, plan=ROOMY, read={"protect": SPANS}),
    "quotas": Case(plan=ROOMY, read={"quotas": QUOTAS}),
    "beams": Case(options={"num_beams": 2}, new=6),
    "beams, every=4": Case(plan={"every": 4}, options={"num_beams": 2}, new=9),
    "question": Case(options={"question_tokens": 6}),
    "fixed": Case(decode="graph"),
    "fixed, every=4": Case(plan={"every": 4}, new=9, decode="graph"),
}


def tiny_model() -> nn.Module:
    """A llama of four layers, float64, whose weights depend on no release of transformers."""
    return fill(build("llama", dtype=torch.float64))


def frozen(model: nn.Module, name: str, cases: Sequence[str] = tuple(CASES)) -> dict[str, Record]:
    """What a method does in each of these cases."""
    return {case: _ran(model, name, CASES[case]) for case in cases}


def differences(expected: Record | None, found: Record) -> list[str]:
    """How a case's record differs from the expected one; empty where it does not. None: there is no expected one."""
    if expected is None:
        return ["is not in the record: write it again"]
    if "refused" in expected or "refused" in found:
        ends = [each.get("refused", "runs") for each in (expected, found)]
        return [] if ends[0] == ends[1] else [f"was {ends[0]}, is {ends[1]}"]
    if expected.keys() != found.keys():
        return [f"has {', '.join(found)}; the record has {', '.join(expected)}"]
    return [line for key in found for line in _differing(key, expected[key], found[key])]


def write(path: Path, records: Mapping[str, Mapping[str, Record]]) -> None:
    """Write the record of all methods; the same records give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(records).encode(), mtime=0))


def read(path: Path) -> dict[str, dict[str, Record]]:
    """Per method and case, what `write` wrote."""
    return json.loads(gzip.decompress(path.read_bytes()))


def _ran(model: nn.Module, name: str, case: Case) -> Record:
    """A case's record; any error is one, also those that are no refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = plan_of(name, model, **{**case.plan, **OWN.get(name, {})})
            stand_in = recorder_stand_in() if case.decode == "graph" else contextlib.nullcontext()
            with stand_in, kvsieve.attach(model, plan, decode=case.decode) as sieve:
                return {**_prefilled(sieve, case), **_answered(sieve, case)}
        except Exception as error:
            return {"refused": type(error).__name__}


def _prefilled(sieve: kvsieve.Sieve, case: Case) -> Record:
    if case.options or case.decode != "eager" or "every" in case.plan:
        return {}
    record, cache = {}, None
    ids, mask = _turn(case.turns, 0)
    for number in range(len(case.turns)):
        if number:
            more, real = _turn(case.turns, number)
            ids, mask = torch.cat([ids, more], 1), torch.cat([mask, real], 1)
        cache = sieve.prefill(ids, mask, cache=cache, **case.read)
        record[f"prefill {number}"] = _kept(cache)
    return record


def _answered(sieve: kvsieve.Sieve, case: Case) -> Record:
    record, cache = {}, None
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True, **case.read, **case.options}
    options |= {"max_new_tokens": case.new, "min_new_tokens": case.new}
    ids, mask = _turn(case.turns, 0)
    for number in range(len(case.turns)):
        if number:
            more, real = _turn(case.turns, number)
            ids, mask = torch.cat([ids, more], 1), torch.cat([mask, real], 1)
        result = sieve.generate(ids, mask, cache=cache, **options)
        cache, ids = result.cache, result.sequences
        mask = torch.cat([mask, torch.ones(len(ids), case.new, dtype=mask.dtype)], 1)
        record[f"kept {number}"] = _kept(cache)
        record[f"tokens {number}"] = ids[:, -case.new :].tolist()
        record[f"logits {number}"] = _logits(torch.stack(result.output.logits, 1))
        record[f"stats {number}"] = _statistics(result.stats)
    return record


def _turn(turns: Sequence[Sequence[int]], number: int) -> tuple[Tensor, Tensor]:
    """A turn's new tokens int64 [B, N] and their mask [B, N]; shorter rows are padded on the left."""
    lengths, longest = torch.tensor(turns[number]), max(turns[number])
    ids = torch.randint(2, 120, (len(lengths), longest), generator=torch.Generator().manual_seed(number + 1))
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    return ids * mask, mask


def _logits(logits: Tensor) -> list[list[list[float]]]:
    return [[[round(each, DIGITS) for each in step] for step in row] for row in logits[..., ::STRIDE].tolist()]


def _kept(cache: kvsieve.SieveCache) -> list[list[list[str]]]:
    """Per row, layer and head: the stored columns of the conversation, as ranges."""
    size = next(iter(cache.sieve_layers.values())).store.index.shape[0]
    return [[[_ranges(sorted(head)) for head in layer] for layer in row] for row in stored(cache, [0] * size)]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _statistics(stats: Any) -> Record:
    traffic = stats.traffic
    return {
        "applied": stats.applied,
        "deep_tokens": stats.deep_tokens,
        "kv_entries": stats.kv_entries,
        "engine": stats.decoding.engine,
        "read": [round(each, 3) for each in (traffic.entries, traffic.estimate_entries, traffic.upkeep_entries)],
    }


def _differing(key: str, expected: Any, found: Any) -> list[str]:
    if expected == found:
        return []
    if key.startswith("logits"):
        ours, theirs = torch.tensor(found), torch.tensor(expected)
        if ours.shape == theirs.shape:
            most = float((ours - theirs).abs().max())
            return [f"{key}: differ by up to {most:.2g}"] if not most <= TOLERANCE else []
    if key.startswith(("kept", "prefill")):
        return [f"{key}: {line}" for line in _first_differing(expected, found)]
    return [f"{key}: was {expected}, is {found}"]


def _first_differing(expected: list[Any], found: list[Any]) -> list[str]:
    """The first head that keeps other tokens, and how many heads do."""
    shapes = [[[len(layer) for layer in row] for row in each] for each in (expected, found)]
    if shapes[0] != shapes[1]:
        return [f"rows, layers or heads: were {shapes[0]}, are {shapes[1]}"]
    places = [
        (row, layer, head)
        for row, layers in enumerate(found)
        for layer, heads in enumerate(layers)
        for head, tokens in enumerate(heads)
        if tokens != expected[row][layer][head]
    ]
    row, layer, head = places[0]
    return [
        f"other tokens in {len(places)} heads, first in row {row}, layer {layer}, head {head}: were "
        f"{expected[row][layer][head]}; are {found[row][layer][head]}"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--write", type=Path, metavar="FILE", help="record all methods, or those of --methods anew in it")
    todo.add_argument("--compare", type=Path, metavar="FILE", help="compare with a record, and exit 1 where it differs")
    parser.add_argument("--methods", help="those to record or compare, separated by commas; all")
    options = parser.parse_args()
    names = options.methods.split(",") if options.methods else kvsieve.list_methods()
    model = tiny_model()
    # Generating collects garbage to measure memory; what the imports left need not be looked at each time.
    gc.collect()
    gc.freeze()
    records = {name: frozen(model, name) for name in names}
    if options.write is not None:
        known = read(options.write) if options.methods else {}
        write(options.write, dict(sorted({**known, **records}.items())))
        return 0
    known = read(options.compare)
    count = 0
    for name, cases in records.items():
        for case, record in cases.items():
            for line in differences(known.get(name, {}).get(case), record):
                count += 1
                print(f"{name}, {case}: {line}")
    gone = sorted(set(known) - set(kvsieve.list_methods()))
    for name in gone:
        print(f"{name}: is in the record, but is no method")
    return 1 if count or gone else 0


if __name__ == "__main__":
    sys.exit(main())

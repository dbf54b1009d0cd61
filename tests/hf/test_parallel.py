"""Tensor parallelism: two processes, with half of the heads each, against one that has them all."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import runpy
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import kvsieve
from doc_pages import sections
from forked import forked
from kvsieve.cache import DenseStore
from kvsieve.errors import KvsieveError, KvsieveWarning
from kvsieve.methods import TOVA, TSP, AdaKV, DuoAttention, PyramidKV, QFilters, SnapKV
from kvsieve.types import ALONE, Ranks
from small import draft
from tiny_models import build
from toy_words import word_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
HEADS, LAYERS, RANKS = 4, 4, 2
GREEDY = {"do_sample": False}
SCORES = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(3)).tolist()
FILTERS = torch.randn(LAYERS, HEADS, 8, generator=torch.Generator().manual_seed(4)).tolist()
WINDOW = {"window": 4, "kernel": 3}
KVZIP = {"chunk_length": 16, "prefix": 3, "repeat_ids": (5, 6), "go_on_ids": (7,), "answer_ids": (8, 9)}


def named(*args, **kwargs):
    return lambda: kvsieve.plan(*args, **kwargs)


# What is run: a plan, made late so that importing this file costs nothing, and options of generate.
CASES = {
    "full": (named("full"), {}),
    "snapkv": (named("snapkv", budget=16, **WINDOW), {}),
    "snapkv drafts": (named("snapkv", budget=16, **WINDOW), {"draft": "lookup:ngram=1:adapt=false"}),
    "h2o drafts": (named("h2o", budget=14), {"draft": "lookup:ngram=1:adapt=false"}),
    "snapkv beams": (named("snapkv", budget=16, **WINDOW), {"num_beams": 2}),
    "snapkv sampled": (named("snapkv", budget=16, **WINDOW), {"do_sample": True}),
    "snapkv per query head": (named("snapkv", budget=16, per_query_head=True, **WINDOW), {}),
    "snapkv encoded": (named("snapkv", budget=20, codec="kivi:bits=8:block=8:tail=4", **WINDOW), {}),
    "streamingllm": (named("streamingllm", budget=12, every=2), {}),
    "knorm": (named("knorm", budget=12), {}),
    "keydiff chunks": (named("keydiff", budget="30%", chunks=True), {"chunk": 12}),
    "lagkv": (named("lagkv", budget="50%", sinks=2, lag=4), {}),
    "h2o": (named("h2o", budget=14), {}),
    "tova": (named("tova", budget=14), {}),
    "sagekv": (named("sagekv", budget=14, every=2), {}),
    "expectedattention": (named("expectedattention", budget=14), {}),
    "corm": (named("corm", queries=4, recent=3), {}),
    "morphkv": (named("morphkv", budget=14, window=4), {}),
    "random": (named("random", budget=14, recent=3, every=1), {}),
    "random answers": (named("random", budget=14, recent=1, every=1, answer=2), {}),
    "roco": (named("roco", budget=14, newest=3, sinks=1), {}),
    "scope": (named("scope", budget=14, base="knorm", answer=2, recent=1), {}),
    "threshold": (named("threshold", budget=20, base="knorm", threshold=-2.5, recent=4, every=1), {}),
    "vase": (named("vase", budget=14, window=4, large=3, every=1), {}),
    "qfilters": (lambda: kvsieve.Plan(evict=QFilters(budget=14, filters=FILTERS)), {}),
    "criticalkv": (named("criticalkv", budget="30%", base="knorm"), {}),
    "chunkkv": (named("chunkkv", budget="30%", base="knorm", chunk_length=4), {}),
    "chunkkv tova": (named("chunkkv", budget="30%", base="tova", chunk_length=4), {}),
    "lookahead": (named("lookahead", budget=14, lookahead=3, **WINDOW), {}),
    "finch": (named("finch", budget="40%", question_tokens=5, chunk_length=16), {}),
    "pyramidkv": (named("pyramidkv", budget=14, **WINDOW), {}),
    "per-layer": (named("per-layer", budget="30%", shares="4/3/2/1", base="tova"), {}),
    "adakv": (named("adakv", budget=14, every=2, **WINDOW), {}),
    "adakv kvpress": (named("adakv", budget=14, rule="kvpress", **WINDOW), {"protect": [(2, 9)]}),
    "duoattention": (lambda: kvsieve.Plan(evict=DuoAttention(budget=20, heads=SCORES, sinks=2, recent=8)), {}),
    "cake": (named("cake", budget=14, **WINDOW), {}),
    "zigzagkv": (named("zigzagkv", budget="30%", base="knorm"), {}),
    "dynamickv": (named("dynamickv", budget=14, interval=2, **WINDOW), {}),
    "squeezeattention": (named("squeezeattention", budget=14), {}),
    "kvzip": (named("kvzip", budget="40%", **KVZIP), {}),
    "kvzip uniform": (named("kvzip", budget="40%", uniform=True, **KVZIP), {}),
    "perturn": (named("perturn", budget="40%", base="knorm"), {}),
    "fastkv": (named("fastkv", budget=14, tsp_layer=1, tsp_rate=0.5, **WINDOW), {}),
    "fastkv chunks": (lambda: kvsieve.Plan(propagate=TSP(rate=0.4, layer=1, **WINDOW)), {"chunk": 12}),
    "fastkv adakv": (
        lambda: kvsieve.Plan(
            propagate=TSP(rate=0.5, layer=1, **WINDOW),
            evict=AdaKV(base=SnapKV(budget=14, **WINDOW)),
        ),
        {"protect": [(2, 9)]},
    ),
    "claa": (named("claa", budget=14, tsp_layer=2, tsp_rate=0.5, joined=2, skip_layers=1, **WINDOW), {}),
    "staged": (named("staged", budget=14, tsp_layer=2, early_layer=0, tsp_rate=0.4, **WINDOW), {}),
    "specprefill": (
        lambda: kvsieve.plan("specprefill", draft=draft(), keep="40%", chunk_length=4, keep_last=4, lookahead=3),
        {},
    ),
    "asl": (named("asl", budget=14, observed=2, first=1, tau=0.9, **WINDOW), {}),
    "asl twice": (named("asl", budget=14, observed=2, first=1, tau=0.9, two_pass=True, **WINDOW), {}),
    "gemfilter": (named("gemfilter", budget=20, layer=1, paper=True), {}),
    "pyramidinfer": (named("pyramidinfer", rate=0.4, recent=0.1, min_context=8, paper=True), {}),
    "rocketkv": (named("rocketkv", budget=16, window=4, kernel=5), {}),
    "rocketkv-mt": (named("rocketkv-mt", budget=16, window=4, kernel=5), {}),
    "quest": (named("quest", budget=16), {}),
    "hsa": (named("hsa", budget=16), {}),
    "sparq": (named("sparq", budget=16), {}),
    "exacttopk": (named("exacttopk", budget=16), {}),
    "mixed": (named("mixed", budget=16, paper=True, **WINDOW), {}),
    **{
        name: (named(name, block=8, tail=4), {})
        for name in ("fp8", "hqq", "int8", "k8v4", "kivi", "outlier", "rotated")
    },
    **{
        name: (named(name, block=4, queries=8, least=16, sinks=1, local=4), {})
        for name in ("a-shape", "flashprefill", "flexprefill", "minference")
    },
    "xattention": (named("xattention", block=4, queries=8, least=16, stride=2, threshold=0.6), {}),
}


def run(model) -> dict[str, dict]:
    """Every case: a padded batch, and a second turn on its cache."""
    warnings.simplefilter("ignore", KvsieveWarning)
    tokens = torch.Generator().manual_seed(5)
    ids, more = (torch.randint(2, 120, (2, size), generator=tokens) for size in (48, 17))
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    out = {}
    for name, (make, options) in CASES.items():
        options = {**GREEDY, **options, "max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": None}
        with kvsieve.attach(model, make()) as sieve:
            turns, cache, talk, seen = [], None, ids, mask
            for _ in range(1 if "num_beams" in options else 2):
                torch.manual_seed(1)
                result = sieve.generate(talk, seen, cache=cache, **options)
                cache, stats = result.cache, result.stats
                # What was read a process counts for its own heads.
                notes = [note for note in stats.notes if not note.startswith("choosing what to read cost")]
                told = {"notes": notes, "report": stats.report, "deep": stats.deep_tokens}
                turns.append({"sequences": result.sequences, "columns": columns(cache), "told": told})
                talk = torch.cat([result.sequences, more], 1)
                seen = torch.cat([seen, seen.new_ones(2, talk.shape[1] - seen.shape[1])], 1)
            # Of others each process rounds its own room.
            exact = all(type(layer.store) is DenseStore for layer in cache.layers)
        out[name] = {"turns": turns, "bytes": stats.storage.bytes if exact else None}
    return out


def columns(cache) -> list[list[list[list[int]]]]:
    """Per layer, row and head, the columns of what is stored."""
    out = []
    for layer in cache.layers:
        index, valid = layer.store.index, layer.store.valid
        real = torch.ones_like(index, dtype=torch.bool) if valid is None else valid.expand_as(index)
        out.append([[h[r].tolist() for h, r in zip(*row, strict=True)] for row in zip(index, real, strict=True)])
    return out


@dataclass(frozen=True, kw_only=True)
class Silent(SnapKV):
    """Says nothing about heads, though what it inherits from does."""


def refusals(model, path: Path) -> dict[str, str]:
    """What is refused, and with what words."""

    def refused(plan, act=None) -> str:
        try:
            with kvsieve.attach(model, plan) as sieve:
                if act is not None:
                    act(sieve)
        except KvsieveError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    snapkv, ids, out = kvsieve.plan("snapkv", budget=6, window=4), torch.arange(2, 18)[None], {}
    out["undeclared"] = refused(kvsieve.Plan(evict=Silent(budget=6, window=4)))
    out["undeclared base"] = refused(kvsieve.Plan(evict=PyramidKV(base=Silent(budget=6, window=4))))
    out["ragged by all heads"] = refused(kvsieve.Plan(evict=AdaKV(base=TOVA(budget=6))))
    out["save"] = refused(snapkv, lambda sieve: sieve.save(sieve.prefill(ids), path / "cache.safetensors"))
    out["load"] = refused(snapkv, lambda sieve: sieve.load(path / "cache.safetensors"))
    config, mesh = model.config, model._device_mesh
    # As if the model's heads were other than they are, or had been divided by something else.
    config.num_key_value_heads = 3
    out["uneven"] = refused(snapkv)
    config.num_key_value_heads, config.num_attention_heads = HEADS, 4 * HEADS
    out["whole heads"] = refused(snapkv, lambda sieve: sieve.prefill(ids))
    config.num_attention_heads, model._device_mesh = 2 * HEADS, None
    out["unknown"] = refused(snapkv)
    model._device_mesh = mesh
    return out


def example(path: Path) -> str:
    """What the example prints."""
    said = io.StringIO()
    main = runpy.run_path(str(ROOT / "examples" / "parallel.py"))["main"]
    options = ["--method", "fastkv", "--budget", "8", "--set", "tsp_layer=1", "--set", "window=4", "--dtype", "float64"]
    with contextlib.redirect_stdout(said):
        main([str(path), str(path / "prompt.txt"), "--max-new-tokens", "4", *options])
    return said.getvalue()


def work(tell, path: Path, rank: int, port: int) -> None:
    """What each process of the test does, in the environment that torchrun gives it."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, logging
    from transformers.distributed import DistributedConfig

    logging.set_verbosity_error()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    given |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= {name: str(value) for name, value in given.items()}
    shared = DistributedConfig(tp_plan="auto", tp_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=shared, dtype=torch.float64).eval()
    gc.freeze()
    found = {"cases": run(model), "refused": refusals(model, path), "example": example(path)}
    torch.save(found, path / f"rank{rank}.pt")
    dist.destroy_process_group()
    tell("done")


@pytest.fixture(scope="module")
def model():
    # Of these weights, half of the heads would make other clusters of layers (SqueezeAttention) than all of them.
    return build("llama", seed=15, dtype=torch.float64, num_attention_heads=2 * HEADS, num_key_value_heads=HEADS)


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    model.save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "prompt.txt").write_text(" ".join(f"w{7 * i % 120}" for i in range(60)))
    return path


@pytest.fixture(scope="module")
def one(model):
    return run(model)


@pytest.fixture(scope="module")
def ranks(directory):
    pytest.importorskip("accelerate", reason="transformers loads a model in parts with accelerate only")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with forked(work, directory, 0, store.port) as (_, first), forked(work, directory, 1, store.port) as (_, second):
        assert [first.recv(), second.recv()] == ["done"] * RANKS
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(RANKS)]


def test_two_processes_are_one(one, ranks):
    """Every case in one test: what a fixture runs is then run by one worker."""
    for name, alone in one.items():
        for rank, found in enumerate(each["cases"][name] for each in ranks):
            for ours, theirs in zip(found["turns"], alone["turns"], strict=True):
                assert torch.equal(ours["sequences"], theirs["sequences"]), name
                assert near(ours["told"], theirs["told"]), name
                for layer, whole in zip(ours["columns"], theirs["columns"], strict=True):
                    for heads, all_heads in zip(layer, whole, strict=True):
                        each = len(all_heads) // RANKS
                        assert heads == all_heads[rank * each : (rank + 1) * each], name
        if alone["bytes"] is not None:
            assert sum(each["cases"][name]["bytes"] for each in ranks) == alone["bytes"], name
    # The comparison is of plans that did act, in the first turn at least.
    notes = {name: turn["told"]["notes"] for name, each in one.items() for turn in each["turns"][:1]}
    assert notes == {name: [] for name in CASES}


def near(ours, theirs) -> bool:
    """Equal, numbers up to rounding."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(near(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(near, ours, theirs))
    return ours == (pytest.approx(theirs) if isinstance(theirs, float) else theirs)


REFUSED = {
    "undeclared": "PlanError: 'Silent' cannot run .* divided among 2 processes: Silent does not say whose heads",
    "undeclared base": "PlanError: 'PyramidKV' cannot run .* PyramidKV does not say",
    "ragged by all heads": "PlanError: 'AdaKV' cannot run",
    "save": "CacheFileError: the model's heads are divided among 2 processes",
    "load": "CacheFileError: the model's heads are divided among 2 processes",
    "uneven": "UnsupportedModelError: .* 8 query and 3 KV heads, which 2 processes cannot share evenly",
    "whole heads": "UnsupportedModelError: this process attends with 4 query heads, one part in 2 of 16 was expected",
    "unknown": "UnsupportedModelError: LlamaForCausalLM is divided among processes in a way kvsieve does not know",
}


def test_what_cannot_be_decided_alike_is_refused(ranks):
    for found in ranks:
        assert found["refused"].keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert re.match(words, found["refused"][name]), found["refused"][name]


def test_the_example_prints_once(directory, ranks):
    alone, first = example(directory).splitlines(), ranks[0]["example"].splitlines()
    assert ranks[1]["example"] == "" and len(first) == 2
    assert first[0] == alone[0] and first[1].startswith("fastkv: 60 prompt tokens, at most 8 entries kept")


def needed(name: str) -> str:
    info = kvsieve.method_info(name)
    made = info.make(**info.example)
    said = {role.traits.heads for role in (made.propagate, made.evict, made.prefill) if role is not None}
    return "refused" if None in said else "all" if "all" in said else "own"


def test_the_document_tells_of_every_method_and_each_is_compared():
    page = sections((ROOT / "docs" / "models.md").read_text())["several-processes-several-machines"]
    own = re.search(r"^\*\*Nothing is exchanged\*\*.*?\n\n", page, re.M | re.S).group()
    pending = re.search(r"^\*\*Not compared among processes yet\*\*.*?\n\n", page, re.M | re.S).group()
    waiting = set(re.findall(r"`([\w-]+)`", pending))
    table = "\n".join(re.findall(r"^\| [^|]+ \| (`.*) \|$", page, re.M))
    documented = {
        name: heads for heads, text in (("own", own), ("all", table)) for name in re.findall(r"`([\w-]+)`", text)
    }
    assert documented == {name: needed(name) for name in kvsieve.list_methods() if name not in waiting}
    assert {case.split()[0] for case in CASES} == set(kvsieve.list_methods()) - waiting


def test_alone_a_process_has_all_heads():
    scores = torch.rand(1, 4, 7)
    assert ALONE.gather(scores) is scores and ALONE.mean(scores) is scores and ALONE.most((3, 1)) == (3, 1)
    assert ALONE.own(4) == slice(0, 4) and [Ranks(rank, 2).own(6) for rank in (0, 1)] == [slice(0, 3), slice(3, 6)]

"""The vLLM plugin measured: sparse reading and eviction beside vLLM's own dense attention.

    python benchmarks/speed/vllm_plugin.py --model CHECKPOINT [--parts layer,decode,pool,needles,identical,preempt]
        [--lengths 7500] [--batches 1] [--readers quest:budget=256] [--graphs] [--rounds 5] [--dtype bfloat16]
        [--small] [--out FILE]

In vLLM's environment (`make test-vllm` makes one: .venv-vllm/bin/python), on the device that vLLM finds there. One
engine runs at a time, each part in a process of its own. `--model random:8b` is a model of random weights in the sizes
of Llama 3.1 8B, for the times alone.

layer: one layer's attention for one token, dense with blocks of 32 and of 128 entries, and the choice of pages with the
attention to them, on random entries that no cache of the processor holds; on GPUs for each number of `--batches`, with
FlashAttention in place of wide blocks. decode: time per token of `--batches` requests at once, dense and sparse taking
turns on one engine and the same cached prompts, and vLLM as it is without the plugin: with blocks of 128 on CPUs, on
GPUs with the attention, the blocks and the CUDA graphs that it chooses itself. On GPUs engines otherwise run without
graphs; `--graphs` measures the plugin with the pieces that it leaves in them, too. pool: eight prompts in a pool of 260
blocks, in turn with eviction, with eviction but vLLM's own attention to prompts, dense, and dense with no more requests
at once than end there, so that none is preempted. needles: right answers. identical: mixed batches that read all pages
beside dense ones, token by token. preempt: answers after forced preemptions beside undisturbed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
RANDOM, MARK = "random:8b", "result: "
# Parts that reach into an engine. Its threads are not bound to cores then: vLLM does that for processes that it starts.
WITHIN = ("layer", "turns", "itself", "disturbed", "crowd")
# Requests of `pool` that dense attention brings to their ends without a preemption.
FEW = 3
EVICT, READ, MEANS = "snapkv:budget=512", "quest:budget=256:page=32", "quest:budget=256:page=4:means=true"
# Query heads, KV heads and channels: SmolLM2-135M, Qwen2.5-0.5B, and those of 8B models.
GEOMETRIES = {"smollm2-135m": (9, 3, 64), "qwen2.5-0.5b": (14, 2, 64), "8b": (32, 8, 128)}


@functools.cache
def on_gpu() -> bool:
    """Tell whether vLLM finds a GPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


@contextlib.contextmanager
def engine(given: argparse.Namespace, plan: str | None, *, self_test: bool = False, **options: Any) -> Iterator[Any]:
    """Make an engine in this process."""
    from vllm import LLM

    config = {} if plan is None else {"kvsieve": {"plan": plan, "self_test": self_test}}
    options = {"block_size": 32, "max_num_seqs": 8, "enforce_eager": True, "seed": 0, "dtype": given.dtype, **options}
    if on_gpu():
        # The rest is for the pages' bounds, of which vLLM does not know.
        options.setdefault("gpu_memory_utilization", 0.85)
    if given.model != RANDOM:
        yield LLM(given.model, additional_config=config, disable_log_stats=False, **options)
        return
    from transformers import LlamaConfig

    heads, kv_heads, dim = GEOMETRIES["8b"]
    sizes = LlamaConfig(
        vocab_size=128256, hidden_size=heads * dim, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=131072,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        sizes.save_pretrained(folder)
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        yield LLM(folder, additional_config=config, disable_log_stats=False, **options)


def needle_prompts(llm: Any, lengths: list[int], each: int) -> list[tuple[list[int], str]]:
    """Prompts of RULER's first needle task, as token ids, and their answers."""
    if llm.llm_engine.model_config.skip_tokenizer_init:
        drawn = random.Random(0)
        return [([drawn.randrange(3, 30000) for _ in range(length)], "") for length in lengths for _ in range(each)]
    from kvsieve.lab.tasks import chosen_tasks
    from kvsieve.lab.tasks.prompter import Prompter

    prompter, task = Prompter(llm.get_tokenizer()), chosen_tasks(["ruler_niah_single_1"])[0]
    samples = [task.sample(index, length, 0, prompter.count) for length in lengths for index in range(each)]
    return [(prompter.encode(sample).prompt[0].tolist(), sample.turns[0].answers[0]) for sample in samples]


def answered(llm: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
    """Answer prompts greedily, all at once."""
    from vllm import SamplingParams

    words = not llm.llm_engine.model_config.skip_tokenizer_init
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=words)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def metric(llm: Any, name: str) -> float:
    """Return a counter of vLLM's."""
    return next(each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")


def core(llm: Any) -> Any:
    """Return the engine within an engine of this process."""
    return llm.llm_engine.engine_core.engine_core


def layer(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one layer's attention."""
    if on_gpu():
        return layer_on_gpu(given)
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvsieve.kernels.cpu import pages as compiled
    from kvsieve.methods import Quest
    from kvsieve_vllm.pages import PageBounds, choose_pages

    current_platform.import_kernels()
    dtype, counts = getattr(torch, given.dtype), 8
    kernel, threads = compiled.built().status, torch.get_num_threads()
    out: dict[str, Any] = {"pages_read": counts, "kernel": kernel, "threads": threads}

    def one(length: int, heads: int, kv_heads: int, dim: int, page: int) -> dict[str, Callable[[], Any]]:
        blocks, copies = -(-length // page) + 1, 4
        isa, groups, turn = _get_attn_isa(dtype, page, dim), heads // kv_heads, [0]
        caches = [torch.randn(blocks, kv_heads, page, 2 * dim).to(dtype) for _ in range(copies)]
        bounds = [PageBounds(blocks, kv_heads, dim, page, caches[0]) for _ in range(copies)]
        # Of parts of 4 entries, as under MEANS.
        sums = [PageBounds(blocks, kv_heads, dim, page, caches[0], parts=page // 4, means=True) for _ in range(copies)]
        for each in (*bounds, *sums):
            each.table.normal_()
        query = torch.randn(1, heads, dim).to(dtype)
        key, slot = torch.randn(1, kv_heads, dim).to(dtype), torch.tensor([length - 1 + page])
        table = torch.arange(1, blocks, dtype=torch.int32)[None]

        def call(asked: Any, keys_in: Any, lengths: Any, pages: Any, asked_heads: int, kv: int) -> Callable[[], Any]:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
            schedule = ops.cpu_attn_get_scheduler_metadata(
                len(lengths), asked_heads, kv, dim, lengths, dtype, starts, True, -1, isa, True
            )
            into = torch.empty_like(asked)
            keys, values = keys_in.chunk(2, dim=2)
            return lambda: ops.cpu_attention_with_kv_cache(
                asked, keys, values, into, starts, lengths, dim**-0.5, True, None, -1, pages, 0.0, schedule, None
            )

        whole = [
            call(query, each.view(blocks, kv_heads, 2 * page, dim), torch.tensor([length], dtype=torch.int32), table,
                 heads, kv_heads)
            for each in caches
        ]  # fmt: skip
        size, count = torch.tensor([length], dtype=torch.int32), torch.tensor([counts], dtype=torch.int32)

        asked = query.view(1, kv_heads, groups, dim)
        readers = Quest(budget=256), Quest(budget=256, page=4, means=True)

        def choose(number: int, by_means: bool = False) -> Any:
            known = (sums if by_means else bounds)[number]
            known.update(key, slot)
            question = readers[by_means].question(asked, dim**-0.5, known.page, None)
            return choose_pages(known.table, question, table, size, count, counts, page, known.parts)

        read = torch.full((kv_heads,), (length - 1) % page + 1 + (counts - 1) * page, dtype=torch.int32)
        chosen = choose(0).flatten(0, 1)
        few = [
            call(query.view(kv_heads, groups, dim), each.view(blocks * kv_heads, 1, 2 * page, dim), read, chosen,
                 groups, 1)
            for each in caches
        ]  # fmt: skip

        def next_one() -> int:
            turn[0] = (turn[0] + 1) % copies
            return turn[0]

        def sparse(by_means: bool) -> None:
            number = next_one()
            choose(number, by_means)
            few[number]()

        return {
            "dense": lambda: whole[next_one()](),
            "choice": lambda: choose(next_one()),
            "choice_by_means": lambda: choose(next_one(), True),
            "sparse": lambda: sparse(False),
            "sparse_by_means": lambda: sparse(True),
        }

    for name, (heads, kv_heads, dim) in GEOMETRIES.items():
        for length in given.lengths:
            runs = one(length, heads, kv_heads, dim, 32)
            runs["dense_blocks_of_128"] = one(length, heads, kv_heads, dim, 128)["dense"]
            spent: dict[str, list[float]] = {each: [] for each in runs}
            for turn in range(10 * given.rounds + 1):
                for each, run in runs.items():
                    began = time.perf_counter()
                    run()
                    if turn:
                        spent[each].append(time.perf_counter() - began)
            medians = {each: 1e3 * statistics.median(seconds) for each, seconds in spent.items()}
            best = min(medians["dense"], medians["dense_blocks_of_128"])
            out[f"{name} {length}"] = {
                **{each: round(number, 4) for each, number in medians.items()},
                "sparse_to_best_dense": round(medians["sparse"] / best, 3),
                "sparse_by_means_to_best_dense": round(medians["sparse_by_means"] / best, 3),
            }
    return out


def layer_on_gpu(given: argparse.Namespace) -> dict[str, Any]:
    """`layer` on a GPU, for each number of requests: medians, launched and replayed from a CUDA graph."""
    import torch
    from vllm_layer_gpu import calls, milliseconds

    dtype, out = getattr(torch, given.dtype), {"pages_read": 8}
    for name, (heads, kv_heads, dim) in GEOMETRIES.items():
        for length, batch in itertools.product(given.lengths, given.batches):
            runs = calls(length, batch, heads, kv_heads, dim, 32, out["pages_read"], dtype)
            times_of = {each: [milliseconds(run, 50) for _ in range(given.rounds)] for each, run in runs.items()}
            out[f"{name}, {length} tokens, {batch} at once"] = {
                each: {how: round(statistics.median(one[how] for one in times), 4) for how in times[0]}
                for each, times in times_of.items()
            }
            del runs
            torch.cuda.empty_cache()
    return out


def decode(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per token behind cached prompts, by their length and number."""
    spent = {
        plan + ", graphs" * graphs: child(given, "turns", plan=plan, graphs=graphs)
        for plan in given.readers.split(",")
        for graphs in ((False, True) if given.graphs else (False,))
    }
    alone = child(given, "itself", graphs=on_gpu())
    out: dict[str, Any] = {}
    for case, seconds in alone.items():
        row = out[case] = {"vllm_itself_ms": round(1e3 * statistics.median(seconds), 2)}
        for plan, cases in spent.items():
            dense, sparse = (1e3 * statistics.median(cases[case][way]) for way in ("dense", "sparse"))
            ratios = [one / other for one, other in zip(cases[case]["sparse"], cases[case]["dense"], strict=True)]
            row[plan] = {
                "dense_ms": round(dense, 2),
                "sparse_ms": round(sparse, 2),
                "sparse_to_dense_in_turn": round(statistics.median(ratios), 3),
                "sparse_to_best_dense": round(sparse / min(dense, row["vllm_itself_ms"]), 3),
            }
    return out


def cached(given: argparse.Namespace, plan: str | None, **options: Any) -> Iterator[tuple[Any, str, list[list[int]]]]:
    """Yield an engine and prompts that it has read, for each length and number of requests."""
    batches, tokens = given.batches, 8 if given.small else 64
    options |= {"max_model_len": max(given.lengths) + tokens + 32, "enable_prefix_caching": True}
    options |= {"enforce_eager": not given.graphs, "max_num_seqs": max(8, *batches)}
    with engine(given, plan, **options) as llm:
        for length in given.lengths:
            prompts = [ids for ids, _ in needle_prompts(llm, [length], max(batches))]
            for batch in batches:
                answered(llm, prompts[:batch], 2)
                yield llm, f"{length} tokens, {batch} at once", prompts[:batch]


def turns(given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds per token, dense and sparse taking turns on one engine."""
    out: dict[str, dict[str, list[float]]] = {}
    for llm, case, prompts in cached(given, given.plan):
        spent = out[case] = {"dense": [], "sparse": []}
        for turn in range(given.rounds + 1):
            for way in ("dense", "sparse") if turn % 2 else ("sparse", "dense"):
                with densely(llm) if way == "dense" else contextlib.nullcontext():
                    seconds = per_token(answered(llm, prompts, 8 if given.small else 64))
                if turn:
                    spent[way].append(seconds)
    return out


def itself(given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per token of vLLM as it is, with its own size of blocks."""
    tokens = 8 if given.small else 64
    own = {"block_size": None if on_gpu() else 128}
    return {
        case: [per_token(answered(llm, prompts, tokens)) for _ in range(given.rounds + 1)][1:]
        for llm, case, prompts in cached(given, None, **own)
    }


@contextlib.contextmanager
def densely(llm: Any) -> Iterator[None]:
    """Let the engine read everything, by vLLM's own path, and look at no page."""
    runner = core(llm).model_executor.driver_worker.worker.model_runner
    builders = [builder for groups in runner.attn_groups for group in groups for builder in group.metadata_builders]
    planners = [builder._planner for builder in builders]
    for builder in builders:
        builder._planner = None
    yield
    for builder, planner in zip(builders, planners, strict=True):
        builder._planner = planner


def per_token(outputs: list[Any]) -> float:
    """Seconds per token of requests that are answered at once, behind the first token of them all."""
    began = max(output.metrics.first_token_ts for output in outputs)
    ended = max(output.metrics.last_token_ts for output in outputs)
    return (ended - began) / (len(outputs[0].outputs[0].token_ids) - 1)


def pool(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds until eight prompts are answered in a pool of 260 blocks, and how many are right.

    Ratios are of the clock's seconds and of the processor's, which other processes hardly change where OMP_NUM_THREADS
    is 1.
    """
    few, own = f"dense, {FEW} at once", f"{EVICT}, vLLM's kernel"
    sides: dict[str, dict[str, Any]] = {
        EVICT: {"plan": EVICT}, own: {"plan": EVICT, "kernels": False}, few: {"most": str(FEW)}, "dense": {},
    }  # fmt: skip
    out: dict[str, Any] = {name: [] for name in sides}
    for turn in range(given.rounds):
        for name in reversed(sides) if turn % 2 else sides:
            out[name].append(child(given, "crowd", **{"plan": "", **sides[name]}))
    for kind in ("seconds", "processor"):
        times = {name: [each[kind] for each in runs] for name, runs in out.items() if name in sides}
        times["dense at its best"] = [min(pair) for pair in zip(times[few], times["dense"], strict=True)]
        pairs = [(name, other) for name in (EVICT, own) for other in ("dense", "dense at its best")]
        out[f"ratios of {kind}"] = {
            f"{name} to {other}": round(statistics.median(map(operator.truediv, times[name], times[other])), 3)
            for name, other in pairs
        }
    return out


def crowd(given: argparse.Namespace) -> dict[str, Any]:
    """One run of `pool`."""
    length, tokens = (300, 16) if given.small else (2048, 128)
    options = {"num_gpu_blocks_override": 60 if given.small else 260, "enable_prefix_caching": False}
    options |= {"max_num_seqs": given.most}
    with engine(given, given.plan or None, max_model_len=length + tokens + 64, **options) as llm:
        prompts = needle_prompts(llm, [length], 8)
        answered(llm, [prompts[0][0]], 2)
        began, busy = time.perf_counter(), time.process_time()
        outputs = answered(llm, [ids for ids, _ in prompts], tokens)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        right = sum(answer in output.outputs[0].text for output, (_, answer) in zip(outputs, prompts, strict=True))
        counted = {name: metric(llm, f"kvsieve_{name}") for name in ("blocks_freed", "entries_kept") if given.plan}
        return {
            "seconds": round(seconds, 2), "processor": round(busy, 2), "needles": right, "of": len(prompts),
            "preemptions": metric(llm, "num_preemptions"), **counted,
        }  # fmt: skip


def needles(given: argparse.Namespace) -> dict[str, Any]:
    """Right answers at each length, five prompts each, all lengths in one batch; dense, sparse and with eviction."""
    return {plan or "dense": child(given, "found", plan=plan) for plan in ("", READ, MEANS, "hsa:budget=512", EVICT)}


def found(given: argparse.Namespace) -> dict[str, str]:
    """One plan of `needles`."""
    lengths, each = ([300] if given.small else given.lengths), 5
    with engine(given, given.plan or None, max_model_len=max(lengths) + 64, enable_prefix_caching=False) as llm:
        prompts = needle_prompts(llm, lengths, each)
        outputs = answered(llm, [ids for ids, _ in prompts], 24)
    right = [answer in output.outputs[0].text for output, (_, answer) in zip(outputs, prompts, strict=True)]
    return {str(length): f"{sum(right[at * each : (at + 1) * each])}/{each}" for at, length in enumerate(lengths)}


def identical(given: argparse.Namespace) -> dict[str, Any]:
    """Batches, of 50 with prompts of mixed lengths, in which all tokens are those of dense attention, in float32."""
    dense = child(given, "batches", plan="")
    return {
        plan: f"{sum(one == other for one, other in zip(child(given, 'batches', plan=plan), dense, strict=True))}"
        f"/{len(dense)}"
        for plan in (READ, "hsa:budget=512", EVICT)
    }


def batches(given: argparse.Namespace) -> list[Any]:
    """Tokens of the batches of `identical`, with everything read or packed in reverse."""
    given.dtype, rng, out = "float32", random.Random(0), []
    options = {"max_model_len": 1024, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    if on_gpu():
        # The kernel that the plugin extends, in float32 indeed.
        options["attention_config"] = {"backend": "TRITON_ATTN"}
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    with engine(given, given.plan or None, self_test=bool(given.plan), **options) as llm:
        text = llm.get_tokenizer()(Path(__file__).read_text())["input_ids"]
        for _ in range(2 if given.small else 50):
            parts = [(rng.randrange(0, len(text) - 700), rng.randrange(5, 500)) for _ in range(rng.randrange(2, 7))]
            outputs = answered(llm, [text[at : at + length] for at, length in parts], 12)
            out.append([list(output.outputs[0].token_ids) for output in outputs])
    return out


def preempt(given: argparse.Namespace) -> dict[str, Any]:
    """Requests whose answers are the same after forced preemptions, in float32, and how many preemptions there were."""
    out = {}
    for plan in (EVICT.replace("512", "128"), READ, "rocketkv:budget=128"):
        free, forced = child(given, "disturbed", plan=plan, every="0"), child(given, "disturbed", plan=plan, every="4")
        same = sum(one == other for one, other in zip(free["tokens"], forced["tokens"], strict=True))
        out[plan] = {"same": f"{same}/{len(free['tokens'])}", "preemptions": forced["preemptions"]}
    return out


def disturbed(given: argparse.Namespace) -> dict[str, Any]:
    """Answer requests step by step, and put one back after every so many steps, 20 times."""
    from vllm import SamplingParams

    given.dtype, done, step, preempted = "float32", {}, 0, 0
    options = {"max_model_len": 1024, "max_num_batched_tokens": 200, "enable_prefix_caching": False}
    with engine(given, given.plan, **options) as llm:
        text = llm.get_tokenizer()(Path(__file__).read_text())["input_ids"]
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        for number, length in enumerate((400, 250, 333)):
            ids = text[number * 500 : number * 500 + length]
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
        scheduler = core(llm).scheduler
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
            if given.every and step % given.every == 0 and scheduler.running and preempted < 20:
                request = scheduler.running.pop(preempted % len(scheduler.running))
                scheduler._preempt_request(request, 0.0)
                preempted += 1
    return {"tokens": [done[number] for number in sorted(done)], "preemptions": preempted}


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    each.__name__: each for each in (layer, decode, pool, needles, identical, preempt)
}
INNER: dict[str, Callable[[argparse.Namespace], Any]] = {
    each.__name__: each for each in (turns, itself, crowd, found, batches, disturbed)
}


def child(given: argparse.Namespace, part: str, *, graphs: bool = False, kernels: bool = True, **changed: str) -> Any:
    """Run a part in a process of its own, which prints its result behind a mark."""
    options = {"model": given.model, "dtype": given.dtype, "rounds": given.rounds, "plan": given.plan, **changed}
    options.setdefault("lengths", ",".join(map(str, given.lengths)))
    options["batches"] = ",".join(map(str, given.batches))
    command = [sys.executable, __file__, "--inner", part, *(f"--{name}={value}" for name, value in options.items())]
    command += ["--small"] * given.small + ["--graphs"] * graphs
    environment = os.environ | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if part in WITHIN else {})
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if part in WITHIN else {}
    environment |= {} if kernels else {"KVSIEVE_KERNELS": "0"}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.rpartition(MARK)[2].splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a checkpoint's directory")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--lengths", default="7500")
    parser.add_argument("--batches", default="1", help="numbers of requests at once")
    parser.add_argument("--readers", default=READ, help="plans of `decode`, separated by commas")
    parser.add_argument("--graphs", action="store_true", help="measure the plugin with CUDA graphs, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="few tokens, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "vllm.json")
    for name, default in (("inner", ""), ("plan", ""), ("every", "0"), ("most", "8")):
        parser.add_argument(f"--{name}", default=default, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.lengths = [int(each) for each in given.lengths.split(",")]
    given.every, given.most = int(given.every), int(given.most)
    given.batches = [int(each) for each in given.batches.split(",")]
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    if given.inner:
        print(MARK + json.dumps({**PARTS, **INNER}[given.inner](given)), flush=True)
        return
    from kvsieve.report.environment import environment, write_result

    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    for part in given.parts.split(","):
        results = child(given, part) if part == "layer" else PARTS[part](given)
        stamp = {"environment": environment(given.model), "model": Path(given.model).name, "dtype": given.dtype}
        report[f"{part}, {Path(given.model).name}"] = {**stamp, "result": results}
        write_result(given.out, report)
        print(json.dumps({part: results}, indent=1), flush=True)


if __name__ == "__main__":
    main()

"""Bad parameters and bad inputs, thousands of them: each is refused with an error of kvsieve's own, or runs.

    python tests/support/fuzz.py [--parameters 5000] [--inputs 2000] [--seed 0] [--limit 20]

Parameters: for every registered method, and for the classes of roles, values of any kind and size; a plan that can be
made is attached to a tiny model and answers. Inputs: what `generate`, `prefill`, plain calls, chats, saved files and
the command line's method specs are given. A case that raises anything but a KvsieveError, takes longer than `--limit`
seconds or leaves the model changed is printed with its number, by which `--only` runs it again; the script exits 1.
`fuzz_server.py` does the same to a server, and `fuzz_store.py` compares answers with a prefix store and without.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import logging

import kvsieve
from kvsieve import methods
from kvsieve.cli.specs import chosen_spec, compared_methods, make_runs
from kvsieve.lab.eval.cells import settings
from kvsieve.planning.budget import Budget
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.profiles import load_profile
from kvsieve.planning.registry import list_methods, method_info
from tiny_models import build
from toy_chats import chat_tokenizer

GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
NUMBERS = [-(10**40), -(10**9), -1, 0, 1, 2, 3, 4, 5, 8, 16, 31, 2**31 - 1, 2**31, 10**9, 10**9 + 1, 10**18, 10**400]
REALS = [-1.0, -1e-300, 0.0, 1e-300, 0.1, 0.5, 1.0, 1.5, 7.0, 1e9, 1e300, float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "",
    " ",
    "x",
    "avg",
    "max",
    "snapkv",
    "full",
    "20%",
    "0%",
    "nan%",
    "-5",
    "1e3",
    "٣",
    "½",
    "1/2",
    "0/-1",
    "1//",
    ".",
    "9" * 5000,
    "~nouser/x",
    "a\0b",
    "\ud800",
    "\x1b[2J",
    "None",
    "True",
    "[1]",
]
OTHERS = [
    None,
    True,
    False,
    b"x",
    [],
    [1],
    [1.5],
    ["x"],
    [[1]],
    (),
    (0, -1),
    (1, 2, 3),
    (10**400,),
    {},
    {"a": 1},
    set(),
    1j,
    object(),
    int,
    len,
    range(3),
    Ellipsis,
    Budget(tokens=20),
    Budget(ratio=0.5),
    Path("nothing"),
    torch.tensor(3),
    torch.ones(2, 2),
    torch.tensor([], dtype=torch.int64),
    float,
    methods.SnapKV(budget=0.5),
]
ROLES = [each for each in vars(methods).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]
ROLES.remove(methods.ScoredEvictor)


class Hang(BaseException):
    """A case took longer than it may."""


@dataclasses.dataclass
class World:
    """What the cases are tried on."""

    model: Any
    tokenizer: Any
    folder: Path
    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def made(cls, folder: Path) -> World:
        ids = torch.randint(2, 120, (2, 40), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        return cls(build("llama", dtype=torch.float32), chat_tokenizer(), folder, ids, mask)

    def attach(self, plan: kvsieve.Plan) -> Any:
        return kvsieve.attach(self.model, plan, tokenizer=self.tokenizer)


Case = Callable[[World], Any]


def value(draw: random.Random) -> Any:
    pool = draw.choices([NUMBERS, REALS, TEXTS, OTHERS], [3, 2, 2, 2])[0]
    return draw.choice(pool)


def like(draw: random.Random, default: Any) -> Any:
    """A value of the kind of a parameter's default, more often than not."""
    if draw.random() < 0.4:
        return value(draw)
    if isinstance(default, bool):
        return draw.random() < 0.5
    if isinstance(default, (int, float)):
        return draw.choice([each for each in (NUMBERS if isinstance(default, int) else REALS) if 0 <= each < 2**31])
    return draw.choice([*REALS[3:8], *NUMBERS[4:12], "20%", "avg", "max", "0/-1", None])


def parameter_case(draw: random.Random, number: int) -> tuple[str, Case]:
    """A method with some parameters of any kind, or a class of a role."""
    if number % 5 == 4:
        role = draw.choice(ROLES)
        names = [each.name for each in dataclasses.fields(role)]
        needed = {"budget": "50%", "rate": "50%", "question_tokens": 3, "shares": (1, 1, 1, 1)}
        needed["base"] = methods.SnapKV(budget=0.5, window=4)
        made = {each.name for each in dataclasses.fields(role) if each.default is dataclasses.MISSING}
        if made <= needed.keys():
            given = {each: needed[each] for each in made} | {name: value(draw) for name in draw.sample(names, 1)}
            plan = {"read": "Reader"} if hasattr(role, "choose") else {"evict": "Evictor"}
            slot = "propagate" if hasattr(role, "source") else next(iter(plan))
            return f"{role.__name__}(**{given!r})", lambda world: run(world, kvsieve.Plan(**{slot: role(**given)}))
    names = list_methods()
    info = method_info(names[number % len(names)])
    known = [*info.parameters, *info.parameters, "compression_ratio", "kernle"]
    given = dict(info.example)
    for name in draw.sample(known, min(draw.choice([1, 1, 1, 2, 3]), len(known))):
        given[name] = like(draw, info.parameters.get(name))
    if draw.random() < 0.1:
        given = {name: part for name, part in given.items() if name not in info.example}
    return f"plan_without_floor({info.name!r}, **{given!r})", lambda world: run(
        world, plan_without_floor(info.name, **given)
    )


def run(world: World, plan: kvsieve.Plan) -> None:
    """What a plan that could be made does with a prompt and a turn after it."""
    kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    with world.attach(plan) as sieve:
        result = sieve.generate(world.ids, world.mask, chunk=16, **GREEDY)
        more = torch.cat([result.sequences, world.ids[:, :9]], 1)
        ones = torch.ones(2, more.shape[1] - world.mask.shape[1], dtype=torch.int64)
        sieve.generate(more, torch.cat([world.mask, ones], 1), cache=result.cache, **GREEDY)


PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"budget": 16, "window": 4},
    "fastkv": {"budget": 16, "window": 4, "tsp_layer": 1, "tsp_rate": 0.5},
    "gemfilter": {"budget": 16, "layer": 1},
    "finch": {"budget": 24, "question_tokens": 3},
    "kvzip": {"budget": 0.5},
    "h2o": {"budget": 16},
    "hsa": {"budget": 16},
    "adakv": {"budget": 16, "window": 4},
}


def input_case(draw: random.Random, number: int) -> tuple[str, Case]:
    """A call of one of the ways in, with something wrong."""
    kind = list(WAYS)[number % len(WAYS)]
    name = draw.choice(list(PLANS))
    said, call = WAYS[kind](draw)
    plan = plan_without_floor(name, **PLANS[name])

    def case(world: World) -> None:
        with world.attach(plan) as sieve:
            call(world, sieve)

    return f"{kind} under {name}: {said}", case


def ids_of(draw: random.Random, world: World) -> Any:
    """Ids that are none, now and then fine."""
    ids = world.ids
    made: list[Callable[[], Any]] = [
        lambda: ids,
        lambda: ids.float(),
        lambda: ids.to(torch.int32),
        lambda: ids.to(torch.uint8),
        lambda: ids.bool(),
        lambda: ids + draw.choice([1000, -500, 2**40]),
        lambda: ids[0],
        lambda: ids[None],
        lambda: ids[:, :0],
        lambda: ids[:0],
        lambda: ids[:, :1],
        lambda: ids.tolist(),
        lambda: ids.numpy(),
        lambda: ids.to_sparse(),
        lambda: ids.to("meta"),
        lambda: ids.to(torch.complex64),
        lambda: ids.repeat(1, 20),
        lambda: {"input_ids": ids},
        lambda: {"input_ids": ids.tolist(), "attention_mask": world.mask},
        lambda: {"input_ids": ids, "attention_mask": world.mask, "pixel_values": ids},
        lambda: {"attention_mask": ids},
        lambda: value(draw),
    ]
    return draw.choice(made)()


def mask_of(draw: random.Random, world: World) -> Any:
    mask = world.mask
    made: list[Callable[[], Any]] = [
        lambda: None,
        lambda: mask,
        lambda: mask.bool(),
        lambda: mask * draw.choice([2, -1, 255]),
        lambda: mask.float() * draw.choice([0.5, float("nan"), float("-inf"), 1.0]),
        lambda: mask.flip(1),
        lambda: mask * 0,
        lambda: mask[:, :-1],
        lambda: mask[0],
        lambda: mask[:, None, None],
        lambda: mask.tolist(),
        lambda: mask.to(torch.complex64),
        lambda: mask.to_sparse(),
        lambda: mask.to("meta"),
        lambda: value(draw),
    ]
    return draw.choice(made)()


OPTIONS = """
    chunk progress protect quotas reduce cache question_tokens measure max_new_tokens num_beams num_return_sequences
    stopping_criteria streamer generation_config pad_token_id eos_token_id temperature top_k top_p do_sample
    min_new_tokens max_length stop_strings logits_processor prefix_allowed_tokens_fn repetition_penalty
    bad_words_ids suppress_tokens use_cache inputs inputs_embeds past_key_values position_ids output_scores
    return_dict_in_generate tokenizer assistant_model cache_implementation unheard_of negative_prompt_ids
    synced_gpus
""".split()
SPANS = [
    [],
    [(0, 5)],
    [(5, 0)],
    [(0, 500)],
    [(-3, 2)],
    [(0.5, 2)],
    [[(0, 5)], []],
    [(0, 5), 5],
    [((0, 5), 2)],
    [((0, 5), "20%")],
    [((0, 5), float("nan"))],
    [((0, 5), 10**40)],
    [((0, 5), "x"), ((3, 7), 1)],
    [(True, 5)],
]


def options_of(draw: random.Random, names: list[str]) -> dict[str, Any]:
    given = {}
    for name in draw.sample(names, draw.choice([0, 1, 1, 2])):
        spans = name in ("protect", "quotas") and draw.random() < 0.8
        given[name] = draw.choice(SPANS) if spans else value(draw)
    # What a caller's own function raises is the caller's.
    given = {name: part for name, part in given.items() if not callable(part)}
    # A large number of tokens is asked for in earnest: the answer goes on until the context ends.
    if isinstance(given.get("max_new_tokens"), int) and given["max_new_tokens"] > 100:
        given["max_new_tokens"] = 100
    if isinstance(given.get("num_beams"), int) and given["num_beams"] > 8:
        given["num_beams"] = 8
    if isinstance(given.get("num_return_sequences"), int) and given["num_return_sequences"] > 8:
        given["num_return_sequences"] = 8
    return given


Way = Callable[[random.Random], tuple[str, Callable[[World, Any], Any]]]


def generating(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    given, seed = options_of(draw, OPTIONS), draw.random()

    def call(world: World, sieve: Any) -> None:
        own = random.Random(seed)
        sieve.generate(ids_of(own, world), mask_of(own, world), **{**GREEDY, **given})

    return f"{given!r}, ids and mask of {seed}", call


def prefilling(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    given, seed = options_of(draw, OPTIONS[:6]), draw.random()

    def call(world: World, sieve: Any) -> None:
        own = random.Random(seed)
        cache = sieve.prefill(ids_of(own, world), mask_of(own, world), **given)
        sieve.prefill(ids_of(own, world), mask_of(own, world), cache=cache)

    return f"{given!r}, ids and mask of {seed}", call


def chatting(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    texts = [draw.choice([*TEXTS, "w5 w6 w7 w8 w9", "w5 " * 30, value(draw)]) for _ in range(3)]
    made = {name: value(draw) for name in draw.sample(["max_new_tokens", "chunk", "system", "load", "cache"], 1)}
    made = made if draw.random() < 0.4 else {}
    asked = options_of(draw, OPTIONS) if draw.random() < 0.5 else {}

    def call(world: World, sieve: Any) -> None:
        tokenizer = value(random.Random(str(texts))) if len(str(texts)) % 7 == 0 else world.tokenizer
        chat = sieve.chat(tokenizer, **{"max_new_tokens": 3, **made})
        with contextlib.suppress(kvsieve.KvsieveError):
            chat.read(texts[0])
        with contextlib.suppress(kvsieve.KvsieveError):
            chat.ask(texts[1], **asked)
        for _ in chat.stream(texts[2]):
            pass
        chat.fork().ask("w5 w6")

    return f"made with {made!r}, texts {texts!r}, asked with {asked!r}", call


def saving(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    given = {name: value(draw) for name in draw.sample(["path", "tokenizer", "ids", "extra", "cache"], 1)}

    def call(world: World, sieve: Any) -> None:
        path = given.get("path")
        if isinstance(path, (str, Path)) and "\0" not in str(path):
            given["path"] = f"{world.folder}/nothing/{path}"
        cache = sieve.prefill(world.ids, world.mask)
        sieve.save(**{"cache": cache, "path": world.folder / "saved", **given})

    return repr(given), call


def loading(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    seed, how = draw.random(), draw.choice(["changed", "cut", "longer", "other", "value", "plan"])
    other = value(draw)

    def call(world: World, sieve: Any) -> None:
        own, path = random.Random(seed), world.folder / "spoiled"
        if how == "value":
            sieve.load(other, tokenizer=None)
            return
        sieve.save(sieve.prefill(world.ids, world.mask), path, tokenizer=world.tokenizer)
        data = bytearray(path.read_bytes())
        if how == "changed":
            for _ in range(own.choice([1, 1, 5])):
                data[own.choice([own.randrange(len(data)), own.randrange(min(len(data), 4000))])] = own.randrange(256)
        elif how == "cut":
            del data[own.randrange(len(data)) :]
        elif how == "longer":
            data += bytes(own.randrange(1, 100))
        elif how == "other":
            data = bytearray(own.randbytes(own.choice([0, 1, 8, 100])))
        path.write_bytes(data)
        sieve.load(path, tokenizer=value(own) if how == "plan" else None)

    return f"{how}, {other!r}, of {seed}", call


def specifying(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    """Methods as the command line and evaluations write them."""
    info = method_info(draw.choice(list_methods()))
    name = draw.choice([*info.parameters, "kernle", "budget"])
    rest = draw.choice(["", "=", "x", "budget=5"])
    text = f"{draw.choice([info.name, info.name, 'snap', ''])}:{name}={value(draw)};{rest}"
    text = draw.choice([text, text, f"{text},{info.name}", f"full,{text}", draw.choice(TEXTS)])

    def call(world: World, sieve: Any) -> None:
        def each(*steps: Callable[[], Any]) -> None:
            for step in steps:
                with contextlib.suppress(kvsieve.KvsieveError):
                    step()

        each(
            lambda: compared_methods(text, None),
            lambda: compared_methods(text, draw.choice(TEXTS), draw.choice([None, "~nouser/x", "a\0b"])),
            lambda: make_runs([chosen_spec(info.name, draw.choice([None, *TEXTS]), [f"{name}={value(draw)}"])]),
            lambda: settings([(info.name, {name: value(draw)})], draw.choice([["10%"], TEXTS[:3]])),
            lambda: load_profile(value(draw)),
            lambda: kvsieve.Plan.from_dict(value(draw)),
            lambda: kvsieve.Plan.from_dict({"evict": {"type": "SnapKV", "budget": value(draw), name: value(draw)}}),
        )

    return repr(text), call


def plain(draw: random.Random) -> tuple[str, Callable[[World, Any], Any]]:
    """The model itself, inside the block, with what reaches kvsieve as it was given."""
    seed = draw.random()

    def call(world: World, sieve: Any) -> None:
        own = random.Random(seed)
        ids, mask = ids_of(own, world), mask_of(own, world)
        if isinstance(ids, torch.Tensor) and not ids.is_meta and not ids.is_sparse:
            sieve.decoder(input_ids=ids, attention_mask=mask, use_cache=own.choice([True, None, False]))

    return f"ids and mask of {seed}", call


WAYS: dict[str, Way] = {
    "generate": generating,
    "prefill": prefilling,
    "chat": chatting,
    "save": saving,
    "load": loading,
    "specs": specifying,
    "model": plain,
}


@contextlib.contextmanager
def watched(limit: float) -> Iterator[None]:
    """Raise Hang in the main thread after `limit` seconds; end the process where even that does not come through."""

    def late(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(10 * limit, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def judged(case: Case, world: World, limit: float) -> tuple[str, str]:
    """What became of a case, "refused", "ran", "foreign", "hang" or "left behind", and the words for it."""
    found = world.model.config._attn_implementation
    try:
        with watched(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case(world)
        outcome = "ran", ""
    except kvsieve.KvsieveError as error:
        outcome = "refused", str(error)
    except Hang:
        outcome = "hang", "".join(traceback.format_exc().splitlines(keepends=True)[-8:])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = "foreign", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in world.model.modules())
    if world.model.config._attn_implementation != found or hooks:
        return "left behind", f"{hooks} hooks after {outcome}"
    return outcome


def fuzz(
    world: World, parameters: int, inputs: int, seed: int, limit: float, only: set[int] | None = None
) -> tuple[collections.Counter[str], list[str]]:
    """Counts of outcomes, and a line for every case that is a defect."""
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for number in range(parameters + inputs):
        if only is not None and number not in only:
            continue
        draw = random.Random(f"{seed}/{number}")
        made = parameter_case(draw, number) if number < parameters else input_case(draw, number - parameters)
        outcome, words = judged(made[1], world, limit)
        counts[outcome] += 1
        if outcome not in ("refused", "ran") or only is not None:
            failures.append(f"case {number} {outcome}: {made[0][:400]}\n    {words[:600]}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=5000)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20, help="seconds a case may take")
    parser.add_argument("--memory", type=float, default=16, help="GiB of address space; more is an error of the case")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases to run again and show")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (int(arguments.memory * 2**30),) * 2)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    only = None if arguments.only is None else set(arguments.only)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        world = World.made(Path(folder))
        counts, failures = fuzz(world, arguments.parameters, arguments.inputs, arguments.seed, arguments.limit, only)
    for line in failures:
        print(line)
    bad = sum(count for outcome, count in counts.items() if outcome not in ("refused", "ran"))
    text = ", ".join(f"{counts[each]} {each}" for each in ("refused", "ran", "foreign", "hang", "left behind"))
    print(f"fuzz: {sum(counts.values())} cases of seed {arguments.seed}: {text}; {time.perf_counter() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

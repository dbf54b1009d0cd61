"""sieve.save and sieve.load: a conversation goes on from its file as if it had never been away, or is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvsieve
from interrupts import Interrupts
from kvsieve import folders
from kvsieve.cache import RaggedStore
from kvsieve.errors import CacheFileError, CacheStateError, InputError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.persist import cache_file, saved
from kvsieve.methods import SnapKV
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint, Profile
from tiny import greedy, tiny_model
from tiny_models import build
from toy_words import word_tokenizer

GREEDY = greedy(max_new_tokens=9, return_dict_in_generate=True, output_logits=True)
PLANS = {
    "full": {},
    "snapkv": {"budget": 30, "window": 4},
    "adakv": {"budget": 30, "window": 4},
    "streamingllm": {"budget": 30, "every": 4},
    "h2o": {"budget": 30},
    "lagkv": {"budget": 60, "lag": 8, "sinks": 2},
    "expectedattention": {"budget": 30},
    "squeezeattention": {"budget": 30},
    "sagekv": {"budget": 30},
    "fastkv": {"budget": 30, "tsp_layer": 1, "tsp_rate": 0.5, "window": 4},
    "asl": {"budget": 50, "tau": 5.0, "first": 1, "observed": 2},
    "gemfilter": {"budget": 30, "layer": 1},
    "finch": {"budget": 40, "question_tokens": 12, "chunk_length": 32},
    "kvzip": {"budget": 30, "chunk_length": 64, "repeat_ids": (3, 5), "go_on_ids": (7,), "answer_ids": (9,)},
    "quest": {"budget": 30},
    "rocketkv-mt": {"budget": 40},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def talk():
    """A padded batch of prompts, their mask, and what is said after the answer."""
    made = torch.Generator().manual_seed(11)
    ids = torch.randint(2, 120, (2, 90), generator=made)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask, torch.randint(2, 120, (2, 40), generator=made)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "talk.safetensors"


def first(sieve, talk, rows=slice(None), **options):
    ids, mask, _ = talk
    return sieve.generate(ids[rows], mask[rows], **{**GREEDY, **options})


def goes_on(sieve, cache, so_far, talk, **options):
    ids, mask, more = talk
    whole = torch.cat([so_far, more[: len(so_far)]], 1)
    ones = torch.ones(len(so_far), whole.shape[1] - mask.shape[1], dtype=mask.dtype)
    return sieve.generate(whole, torch.cat([mask[: len(so_far)], ones], 1), cache=cache, **{**GREEDY, **options})


def parts(value):
    """A cache, or a part of it, as plain values that can be compared; room to spare is not."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.tolist()
    if dataclasses.is_dataclass(value):
        return type(value).__name__, parts(vars(value))
    if isinstance(value, dict):
        return {key: parts(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(parts, value))
    if hasattr(value, "layers"):
        return parts(value.conversation), parts(value.layers)
    if hasattr(value, "store"):
        of_store = {} if value.store.is_empty else parts(value.store.parts())
        return of_store, parts({name: vars(value)[name] for name in value.saved})
    if hasattr(value, "cumulative_length"):
        return value.cumulative_length, parts(value.keys), parts(value.values)
    return value


def same(ours, theirs):
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(mine, its) for mine, its in zip(ours.output.logits, theirs.output.logits, strict=True))
    assert parts(ours.cache) == parts(theirs.cache)


def refused(path, sieve, match, **options):
    with pytest.raises(CacheFileError, match=match) as caught:
        sieve.load(path, **options)
    assert str(path) in str(caught.value)


def plan_of(name, model):
    if name == "duoattention":
        return kvsieve.plan(name, profile=Profile(Fingerprint.of(model), heads=((1.0, 0.0),) * 4), budget=0.6)
    return kvsieve.plan(name, **PLANS[name])


@pytest.mark.filterwarnings("ignore::kvsieve.KvsieveWarning")
@pytest.mark.parametrize("name", [*PLANS, "duoattention"])
def test_a_conversation_goes_on_as_if_it_had_never_been_away(model, talk, path, name):
    with kvsieve.attach(model, plan_of(name, model)) as sieve:
        result = first(sieve, talk)
        sieve.save(result.cache, path, ids=result.sequences, extra={"told": ["a", 1, None]})
        read = sieve.load(path)
        assert parts(read.cache) == parts(result.cache) and torch.equal(read.ids, result.sequences)
        assert read.extra == {"told": ["a", 1, None]} and read.cache.nbytes() <= result.cache.nbytes()
        again = goes_on(sieve, read.cache, read.ids, talk)
        same(again, goes_on(sieve, result.cache, result.sequences, talk))
        sieve.save(again.cache, path)
        assert parts(sieve.load(path).cache) == parts(again.cache) and sieve.load(path).ids is None


@pytest.mark.parametrize("name", ["full", "adakv", "h2o"])
def test_another_process_with_the_same_checkpoint_goes_on(talk, path, name):
    """bfloat16; under other names; and after the prompt alone."""
    plan, later = kvsieve.plan(name, **PLANS[name]), dataclasses.replace(kvsieve.plan(name, **PLANS[name]), name="mine")
    model, other = build("llama", dtype=torch.bfloat16), build("llama", dtype=torch.bfloat16)
    other.config._name_or_path = "elsewhere/copy"
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(*talk[:2])
        sieve.save(cache, path)
        theirs = goes_on(sieve, cache, talk[0], talk)
    with kvsieve.attach(other, later) as sieve:
        same(goes_on(sieve, sieve.load(path).cache, talk[0], talk), theirs)


def test_sliding_window_layers_are_saved_too(talk, path):
    model = build("gemma3_text")
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        result = first(sieve, talk)
        sieve.save(result.cache, path)
        names = load_file(path)
        assert 15 <= names["layers.0.keys"].shape[2] < 20 and names["layers.1.keys"].shape[2] == 38
        same(
            goes_on(sieve, sieve.load(path).cache, result.sequences, talk),
            goes_on(sieve, result.cache, result.sequences, talk),
        )
    wider = build("gemma3_text", sliding_window=24)
    with kvsieve.attach(wider, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        refused(path, sieve, "sliding_window is 16 in the file and 24 here")


@pytest.mark.parametrize("name", ["snapkv", "adakv", "gemfilter"])
def test_what_was_protected_stays_protected(model, talk, path, name):
    with kvsieve.attach(model, kvsieve.plan(name, **PLANS[name])) as sieve:
        quotas = None if name == "gemfilter" else [((20, 40), 6)]
        result = first(sieve, talk, protect=[(3, 8)], quotas=quotas)
        sieve.save(result.cache, path)
        cache = sieve.load(path).cache
        ours = goes_on(sieve, cache, result.sequences, talk)
        same(ours, goes_on(sieve, result.cache, result.sequences, talk))
        if name == "snapkv":
            kept = ours.cache.layers[0].store.index[0, 0].tolist()
            assert set(range(3, 8)) <= set(kept) and sum(20 <= column < 40 for column in kept) >= 6


def test_a_loaded_cache_forks_rolls_back_and_takes_beams(model, talk, path):
    with kvsieve.attach(model, kvsieve.plan("adakv", **PLANS["adakv"])) as sieve:
        result = first(sieve, talk)
        sieve.save(result.cache, path)
        cache = sieve.load(path).cache
        taken, known = cache.snapshot(), parts(cache)
        wanted = goes_on(sieve, result.cache, result.sequences, talk)
        for _ in range(2):
            same(goes_on(sieve, cache.fork(), result.sequences, talk), wanted)
            same(goes_on(sieve, cache, result.sequences, talk), wanted)
            cache.rollback(taken)
            assert parts(cache) == known
        beams = goes_on(sieve, cache, result.sequences, talk, num_beams=2)
        sieve.save(beams.cache, path)
        assert parts(sieve.load(path).cache) == parts(beams.cache) and beams.cache.conversation.batch == 4


def test_only_what_is_used_is_written(model, talk, path):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        cache = sieve.prefill(talk[0] + 1)
        for token in talk[2][:, :3].T:
            model(input_ids=token[:, None], **{CACHE: cache})
        store = cache.layers[0].store
        assert store.buffers()[0].shape[2] > store.size == 93
        sieve.save(cache, path)
        tensors = load_file(path)
        assert tensors["layers.0.keys"].shape == (2, 2, 93, 16) and tensors["layers.0.index"].shape == (2, 2, 93)
        assert path.stat().st_size < 4 * 2 * 2 * 93 * (2 * 16 + 1) * 4 + 10_000
        assert sieve.load(path).cache.layers[0].store.buffers()[0].shape[2] == 93


def test_any_scratch_of_a_method_comes_back_or_is_named(model, talk, path):
    state = {
        "nested": {"a": (1, 2.5, None, "x", {3, 1}), 7: [True, {"deep": torch.tensor(3.0)}]},
        "none": torch.zeros(2, 0),
        "turned": torch.arange(12.0).view(3, 4).T,
        "mask": torch.tensor([True, False]),
        "small": torch.tensor([1.5], dtype=torch.float16),
        "far": float("inf"),
        "": torch.arange(2),
    }
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(talk[0])
        cache.layers[1].state = {**state, "1": torch.ones(1), 1: torch.zeros(1)}
        cache.layers[2].store.derived["kv_rows"] = object()
        sieve.save(cache, path)
        back = sieve.load(path).cache
        assert parts(back) == parts(cache) and back.layers[2].store.derived == {}
        for odd, name in ((object(), "builtins.object"), (torch.zeros(1, dtype=torch.complex64), "complex64")):
            cache.layers[1].state = {"deep": [odd]}
            with pytest.raises(CacheFileError, match=rf"layers\.1\.state\.deep\.0 is a .*{name}"):
                sieve.save(cache, path)
        assert parts(sieve.load(path).cache) == parts(back)


def test_an_empty_cache_is_saved_as_well(model, talk, path):
    with kvsieve.attach(model, kvsieve.plan("h2o", budget=30)) as sieve:
        sieve.save(sieve.new_cache(), path, extra={"system": "be brief"})
        read = sieve.load(path)
        assert read.cache.num_seen == 0 and read.cache.nbytes() == 0 and read.extra == {"system": "be brief"}
        same(first(sieve, talk, cache=read.cache), first(sieve, talk))


def test_no_saving_in_the_middle_of_a_prompt(model, talk, path):
    said = []

    def watch(done, total):
        if done < total:
            with pytest.raises(CacheStateError, match="middle of a prompt"):
                sieve.save(cache, path)
            said.append(done)

    with kvsieve.attach(model, kvsieve.plan("fastkv", **PLANS["fastkv"])) as sieve:
        cache = sieve.new_cache()
        sieve.prefill(*talk[:2], cache=cache, chunk=40, progress=watch)
        assert said == [40, 80] and not path.exists()
        sieve.save(cache, path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ids": torch.zeros(2, 40, dtype=torch.int64)}, r"int64 \[2, 90 or more\], got torch.int64 \(2, 40\)"),
        ({"ids": torch.zeros(1, 90, dtype=torch.int64)}, r"got torch.int64 \(1, 90\)"),
        ({"ids": torch.zeros(2, 90)}, "got torch.float32"),
        ({"ids": [[1] * 90] * 2}, "got list"),
        ({"extra": {"a": object()}}, "extra= cannot be written as JSON"),
        ({"extra": [1]}, "extra= is a dict"),
        ({"cache": None}, "cache takes what sieve.new_cache\\(\\) or an earlier result has, got None"),
    ],
    ids=["too few ids", "other rows", "floats", "list", "extra no JSON", "extra no dict", "no cache"],
)
def test_what_cannot_be_saved_is_refused(model, talk, path, options, match):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        given = {"cache": sieve.prefill(talk[0]), "path": path, **options}
        with pytest.raises(InputError, match=match):
            sieve.save(**given)
    assert not path.exists()


@pytest.fixture(scope="module")
def file(model, talk, tmp_path_factory):
    """A saved conversation under snapkv, its sieve's plan and its tokenizer."""
    path = tmp_path_factory.mktemp("saved") / "talk.safetensors"
    model.config._name_or_path = "acme/tiny"
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        sieve.save(sieve.prefill(*talk[:2]), path, tokenizer=word_tokenizer(), ids=talk[0], extra={"turns": 1})
    model.config._name_or_path = ""
    return path


def test_the_header_is_read_without_a_model(file):
    header = kvsieve.hf.persist.saved.read_header(file)
    assert header["kvsieve"] == kvsieve.__version__ and header["extra"] == {"turns": 1}
    assert header["model"]["id"] == "acme/tiny" and header["model"]["class"] == "LlamaForCausalLM"
    plan = kvsieve.plan("snapkv", budget=30, window=4).for_model(build("llama"))
    assert Plan.from_dict(header["plan"]) == plan and plan.unset is None


def test_another_model_is_refused(file):
    def changed(**overrides):
        return build("llama", **overrides)

    tuned = build("llama")
    with torch.no_grad():
        tuned.model.layers[2].mlp.up_proj.weight.mul_(1.001)
    others = {
        r"acme/tiny \(LlamaForCausalLM\), this model is .*differ in layers.*4 layers.*2 layers": changed(
            num_hidden_layers=2
        ),
        "differ in class, model_type": build("qwen3"),
        "rope_parameters.rope_theta is 10000.0 in the file and 50000.0 here": changed(
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0}
        ),
        "in float32, this model is in bfloat16; load the model in float32": changed(dtype=torch.bfloat16),
        "of the same shape, but with other weights": changed(seed=1),
        "but with other weights": tuned,
    }
    for match, other in others.items():
        with kvsieve.attach(other, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
            refused(file, sieve, match)


def test_another_tokenizer_is_refused_where_both_are_known(model, file, path, talk):
    other = word_tokenizer()
    other.add_tokens(["w124"])
    used = word_tokenizer()
    used(["w1 w2", "w1"], padding=True, truncation=True, max_length=3)  # leaves its settings in the tokenizer
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        refused(file, sieve, "another tokenizer", tokenizer=other)
        assert sieve.load(file, tokenizer=used).cache.conversation.batch == 2
        sieve.save(sieve.load(file).cache, path)
        assert sieve.load(path, tokenizer=other).cache.conversation.batch == 2


def test_another_plan_is_refused_and_what_differs_is_named(model, file):
    others = {
        'evict.budget is "30" in the file and "40" here': kvsieve.plan("snapkv", budget=40, window=4),
        "evict.window is 4 in the file and 8 here": kvsieve.plan("snapkv", budget=30, window=8),
        "evict is SnapKV in the file and null here": kvsieve.plan("full"),
        "'snapkv', and this one, 'adakv', differs: .* more; attach": kvsieve.plan("adakv", budget=30, window=4),
        "propagate is null in the file and TSP here": kvsieve.plan(
            "fastkv", budget=30, window=4, tsp_layer=1, tsp_rate=0.5
        ),
    }
    for match, plan in others.items():
        with kvsieve.attach(model, plan) as sieve:
            refused(file, sieve, match)
    with kvsieve.attach(model, Plan(evict=SnapKV(budget=30, window=4, kernel="auto"))) as sieve:
        assert sieve.load(file).cache.num_seen == 90


def test_files_of_other_kinds_and_formats_are_refused(model, file, tmp_path):
    data = load_file(file)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["kvsieve"])

    def written(**changes):
        save_file(data, tmp_path / "c", {"kvsieve": json.dumps({**header, **changes})})
        return tmp_path / "c"

    (tmp_path / "text").write_text("a talk of long ago, written down by hand\n" * 9)
    (tmp_path / "empty").touch()
    save_file(data, tmp_path / "plain")
    save_file(data, tmp_path / "odd", {"kvsieve": "[1, 2"})
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        # Another writer of the same format is fine.
        assert sieve.load(written()).extra == {"turns": 1}
        refused(tmp_path / "text", sieve, "not a safetensors file")
        refused(tmp_path / "empty", sieve, "not a safetensors file")
        refused(tmp_path, sieve, "cannot be read")
        refused(tmp_path / "none", sieve, "No such file")
        refused(tmp_path / "plain", sieve, "without a cache of kvsieve")
        refused(tmp_path / "odd", sieve, "header cannot be read")
        for version in (1, 5, 7, "6", None):
            written(kvsieve_cache=version, kvsieve="9.0")
            refused(tmp_path / "c", sieve, rf"format {version!r}, written by kvsieve 9.0; this version, .* format 6")
        refused(written(extra={"turns": 2}), sieve, "header does not match its checksum")
        refused(written(sha256=None), sieve, "header does not match its checksum")
        lost = {name: part for name, part in data.items() if name != "layers.2.values"}
        save_file(lost, tmp_path / "lost", {"kvsieve": json.dumps(header)})
        refused(tmp_path / "lost", sieve, "holds no tensor as .layers.2.values., and its header speaks of F32 .2, 2")
        odd = {**data, "layers.2.values": data["layers.2.values"] + 1}
        save_file(odd, tmp_path / "odd", {"kvsieve": json.dumps(header)})
        refused(tmp_path / "odd", sieve, "tensors do not match their checksum")
        # A header that is whole, and not what this version writes.
        del header["cache"]["Conversation"]["dict"][0]
        header["sha256"] = saved.header_digest(header)
        refused(written(), sieve, "cannot be read by")


def test_a_file_that_was_cut_or_changed_anywhere_is_refused(model, file, tmp_path):
    data, broken = file.read_bytes(), tmp_path / "broken"
    head = 8 + int.from_bytes(data[:8], "little")
    made = torch.Generator().manual_seed(3)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        for end in (0, 1, 7, 8, 9, head // 2, head - 1, head, head + 1, len(data) // 2, len(data) - 1):
            broken.write_bytes(data[:end])
            refused(broken, sieve, "not all of one|damaged")
        broken.write_bytes(data + b"\0")
        refused(broken, sieve, "not all of one")
        in_head = torch.randint(0, head, (150,), generator=made).tolist()
        in_data = [head, len(data) - 1, *torch.randint(head, len(data), (40,), generator=made).tolist()]
        bits = torch.randint(0, 8, (len(in_head) + len(in_data),), generator=made).tolist()
        for place, bit in zip([*in_head, *in_data], bits, strict=True):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            broken.write_bytes(changed)
            try:
                sieve.load(broken)
            except CacheFileError:
                continue
            # JSON that means the same: blanks, and capitals in an escape or exponent.
            assert place < head and json.loads(changed[8:head]) == json.loads(data[8:head]), place


@pytest.mark.parametrize("after", [0, 1, 9])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_the_old_file_alone(model, talk, path, monkeypatch, error, after):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(talk[0])
        sieve.save(cache, path, extra={"old": True})
        before, left = path.read_bytes(), [after]

        class Full:
            def __init__(self, file):
                self.file = file

            def __getattr__(self, name):
                return getattr(self.file, name)

            def write(self, given):
                if not left[0]:
                    raise error
                left[0] -= 1
                return self.file.write(given)

        write = saved.write
        monkeypatch.setattr(saved, "write", lambda file, *given: write(Full(file), *given))
        disk = isinstance(error, OSError)
        match = "cannot be written: No space left on device; what was there before is untouched" if disk else None
        with pytest.raises(CacheFileError if disk else KeyboardInterrupt, match=match):
            sieve.save(cache, path, extra={"old": False})
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
        assert sieve.load(path).extra == {"old": True}


def test_where_a_file_cannot_be_written_is_told(model, talk, path, tmp_path, monkeypatch):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(talk[0])

        def cannot(where, match):
            with pytest.raises(CacheFileError, match=match) as caught:
                sieve.save(cache, where)
            assert str(where) in str(caught.value) and ".tmp" not in str(caught.value)

        cannot(tmp_path / "no" / "where", "No such file or directory")
        cannot(tmp_path, "is there already and is not a file")
        cannot(tmp_path / ("x" * 300), "name too long")
        cannot(os.devnull, "is there already and is not a file")
        assert os.listdir(tmp_path) == []

        def deny(*given):
            raise PermissionError(errno.EACCES, "Permission denied", *map(str, given))

        with monkeypatch.context() as patched:
            patched.setattr(saved.os, "replace", deny)
            cannot(path, "Permission denied")
        with monkeypatch.context() as patched:
            patched.setattr(saved.os, "fsync", deny)
            cannot(path, "Permission denied")
        assert os.listdir(tmp_path) == []


def sealed(path, header, data):
    """A file whose checksums are right, whatever it says."""
    header = {**header, "sha256": None}
    header["sha256"] = saved.header_digest(header)
    save_file(data, path, {"kvsieve": json.dumps(header)})
    return path


def changes(header):
    """Headers of which one part says something else."""
    names = [name for name in header if name not in ("extra", "kvsieve_cache", "sha256")]
    yield from ({**header, name: odd} for name in names for odd in (None, [], {"a": [1]}, 3))
    yield from ({key: part for key, part in header.items() if key != name} for name in names)
    yield {**header, "model": {**header["model"], "shape": {"layers": 10**400}}}
    known = header["cache"]["Conversation"]["dict"]
    for index, (name, _) in enumerate(known):
        for odd in (
            {"tensor": "none"},
            {"ShortPrompt": {"dict": []}},
            {"View": 3},
            {"tuple": None},
            {"dict": [[[], 1]]},
        ):
            fields = list(known)
            fields[index] = [name, odd]
            yield {**header, "cache": {"Conversation": {"dict": fields}}}


def test_a_file_that_says_what_cannot_be_is_refused(model, file, tmp_path):
    data = load_file(file)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["kvsieve"])
    deep = '{"dict": ' * 100_000
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        refusals = 0
        for changed in changes(header):
            try:
                sieve.load(sealed(tmp_path / "c", changed, data))
            except CacheFileError as error:
                assert str(tmp_path / "c") in str(error) and len(str(error)) < 2000
                refusals += 1
        assert refusals > 50
        for name in ("cache", "plan", "model", "extra", "layers"):
            nested = []
            for _ in range(900):
                nested = [nested]
            # What Python reads of it depends on how deep it is itself.
            with contextlib.suppress(CacheFileError):
                sieve.load(sealed(tmp_path / "c", {**header, name: nested}, data))
        save_file(data, tmp_path / "deep", {"kvsieve": deep})
        refused(tmp_path / "deep", sieve, "header cannot be read")


@pytest.mark.parametrize("name", ["layers.1.keys", "junk"])
def test_sizes_are_checked_before_anything_is_read(model, file, tmp_path, monkeypatch, name):
    """A file of a few thousand bytes on the disk may say that it holds gigabytes."""
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:head])
    end = len(data) - head
    entries[name] = {"dtype": "F32", "shape": [2, 2, 25_000_000, 16], "data_offsets": [end, end + 6_400_000_000]}
    if name != "junk":
        # Where it was, in between, something else must be.
        was = json.loads(data[8:head])[name]
        entries["filler"] = {**was, "dtype": "F32"}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + data[head:])
        out.truncate(8 + len(text) + end + 6_400_000_000)
    assert sparse.stat().st_blocks * 512 < 10**6

    def read(part):
        raise AssertionError("read before its size was checked")

    monkeypatch.setattr(saved, "copied", read)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        refused(sparse, sieve, "damaged or changed.*speaks of")


def test_what_may_not_be_read_is_not_missing(model, file, tmp_path, monkeypatch):
    real = os.open

    def deny(path, *given, **more):
        if os.fspath(path) == os.fspath(file):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *given, **more)

    os.mkfifo(tmp_path / "pipe")
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        refused(tmp_path / "pipe", sieve, "it is not a file")
        monkeypatch.setattr(os, "open", deny)
        refused(file, sieve, "cannot be read: Permission denied")


@pytest.mark.parametrize(("before", "after"), [(None, 0o600), (0o644, 0o600), (0o640, 0o600), (0o400, 0o400)])
def test_nobody_else_can_read_what_was_said(model, talk, tmp_path, monkeypatch, before, after):
    path, modes, write = tmp_path / "talk", [], saved.write
    if before is not None:
        path.touch()
        path.chmod(before)

    def watch(file, *given):
        modes.append(os.fstat(file.fileno()).st_mode & 0o777)
        write(file, *given)

    monkeypatch.setattr(saved, "write", watch)
    mask = os.umask(0)
    try:
        with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
            sieve.save(sieve.prefill(talk[0]), path)
    finally:
        os.umask(mask)
    assert modes == [0o600] and path.stat().st_mode & 0o777 == after


def test_links_are_followed(model, talk, tmp_path):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(talk[0])
        real, link = tmp_path / "real", tmp_path / "link"
        real.touch()
        link.symlink_to(real)
        sieve.save(cache, str(link))
        assert link.is_symlink() and parts(sieve.load(real).cache) == parts(cache)


def test_what_killed_processes_left_is_cleaned(tmp_path):
    """Only theirs: not what another process is writing, nor anybody's own files."""
    target = tmp_path / "talk"
    dead = [tmp_path / f".talk.{number:012x}.kvsieve-tmp" for number in range(3)]
    others = [tmp_path / name for name in (".talk.tmp", ".walk.000000000000.kvsieve-tmp", "talk.1")]
    for each in (*dead, *others):
        each.write_text("half")
    with open(dead[1]) as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        with cache_file.replacing(target) as file:
            (mine,) = set(tmp_path.iterdir()) - {dead[1], *others}
            # Another process that saves there now leaves ours alone.
            with cache_file.replacing(target, force=True) as other:
                other.write(b"other")
            assert target.read_bytes() == b"other" and mine.exists()
            file.write(b"new")
    assert target.read_bytes() == b"new" and set(tmp_path.iterdir()) == {target, dead[1], *others}


def test_an_interrupt_at_any_place_of_saving(tmp_path):
    target = tmp_path / "talk"
    functions = [cache_file.replacing.__wrapped__, folders.replacing.__wrapped__, folders._created]
    functions += [folders._clean, folders._locked]

    def save():
        with cache_file.replacing(target, force=True) as file:
            file.write(b"new")

    interrupts = Interrupts(functions, ())
    for place in interrupts.places(save):
        target.write_bytes(b"old")
        interrupts.raised(save, place)
        assert target.read_bytes() in (b"old", b"new"), place
    gc.collect()
    save()
    assert list(tmp_path.iterdir()) == [target]


def test_ragged_layers_are_saved_flat(model, talk, path):
    with kvsieve.attach(model, kvsieve.plan("adakv", **PLANS["adakv"])) as sieve:
        cache = sieve.prefill(*talk[:2])
        sieve.save(cache, path)
        store, back = cache.layers[0].store, sieve.load(path).cache.layers[0].store
        assert isinstance(back, RaggedStore) and load_file(path)["layers.0.keys"].shape == (2, store.size, 16)
        assert all(torch.equal(mine, its) for mine, its in zip(store.flat, back.flat, strict=True))
        assert torch.equal(store.index, back.index) and torch.equal(store.valid, back.valid)

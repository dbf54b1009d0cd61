"""What plans do on a GPU is what they do on the CPU: every method, codec and family, in turns and in CUDA graphs.

Run where there is a GPU: `pytest tests/gpu`. Everything is float32, no token comes twice, and padding, whose embedding
is zero, is never said, so that no entries are equally good and both devices choose the same ones.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc

import pytest
import torch

import kvsieve
from drafted import alone, drafted
from kvsieve.errors import KvsieveError
from kvsieve.hf.drafts import draft_passes
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.methods import KIVI
from kvsieve.shared.prompt import next_logits
from oracle import let_drafts_know
from small import plan_of, stored
from tiny_models import available, build

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")

METHODS = [name for name in kvsieve.list_methods() if not kvsieve.method_info(name).is_codec]
CODECS = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_codec]
VOCABULARY = 128
GREEDY = {
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "suppress_tokens": [0],
    "max_new_tokens": 10,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@functools.cache
def model_on(device, family="llama"):
    if device == "cpu":
        return build(family)
    return copy.deepcopy(model_on("cpu", family)).to(device)


@functools.cache
def talk():
    """A padded batch of prompts, their mask, and what is said after the answer."""
    made = torch.Generator().manual_seed(11)
    rows = torch.stack([torch.randperm(VOCABULARY - 2, generator=made) + 2 for _ in range(2)])
    ids, more = rows[:, :80].clone(), rows[:, 80:120]
    mask = torch.ones_like(ids)
    ids[1, :17], mask[1, :17] = 0, 0
    return ids, mask, more


def two_turns(device, plan, *, family="llama", decode="auto", padded=True, chunk=None):
    """Logits of two turns' answers, and what is stored after each."""
    ids, mask, more = (each.to(device) for each in talk())
    if not padded:
        ids, mask, more = ids[:1], mask[:1], more[:1]
    pads = (mask == 0).sum(1).tolist()
    found, held = [], []
    with kvsieve.attach(model_on(device, family), plan, decode=decode) as sieve:
        first = sieve.generate(ids, mask, chunk=chunk, **GREEDY)
        held.append(stored(first.cache, pads))
        whole = torch.cat([first.sequences, more], 1)
        seen = torch.cat([mask, torch.ones_like(whole[:, mask.shape[1] :])], 1)
        second = sieve.generate(whole, seen, cache=first.cache, chunk=chunk, **GREEDY)
        held.append(stored(second.cache, pads))
    for result in (first, second):
        assert result.sequences.device.type == device
        found.append(torch.stack(result.output.logits, 1).cpu())
    return found, held, [first.stats, second.stats]


def assert_same(plan, *, encoded=False, **options):
    """encoded: a number between two codes may get either, so later logits differ, and choices by them."""
    engine = options.pop("decode", "auto")
    theirs, kept, _ = two_turns("cpu", plan, decode="eager", **options)
    ours, held, told = two_turns("cuda", plan, decode=engine, **options)
    assert held[0] == kept[0]
    for mine, other in zip(ours, theirs, strict=True):
        if encoded:
            # The prompt is read exactly; then as long as both have said the same.
            torch.testing.assert_close(mine[:, 0], other[:, 0], atol=2e-3, rtol=2e-3)
            alike = (mine.argmax(-1) == other.argmax(-1))[0].cumprod(0).bool()
            assert (mine - other)[0, alike].abs().median() < 0.05
            break
        # An entry that only one device reads would move logits by some tenths.
        torch.testing.assert_close(mine, other, atol=5e-3, rtol=5e-3)
    assert encoded or held[1] == kept[1]
    return told


@pytest.mark.parametrize("decode", ["eager", "auto"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, decode):
    assert_same(plan_of(name, model_on("cpu")), decode=decode, padded=False, encoded=name == "mixed")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_a_padded_batch(name):
    assert_same(plan_of(name, model_on("cpu")), padded=True, encoded=name == "mixed")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_chunks(name):
    assert_same(plan_of(name, model_on("cpu")), padded=False, chunk=32, encoded=name == "mixed")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("evict", ["full", "snapkv", "adakv", "rocketkv", "quest", "hsa"])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec(name, evict, padded):
    encoding = plan_of(name, model_on("cpu"), block=16, tail=16)
    # `mixed` has an evictor of its own.
    if encoding.evict is not None and evict != "full":
        pytest.skip(f"{name} evicts by itself")
    plan = encoding
    if encoding.evict is None:
        plan = dataclasses.replace(plan_of(evict, model_on("cpu")), codec=encoding.codec)
    assert_same(plan, padded=padded, encoded=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["snapkv", "rocketkv", "fastkv"])
@pytest.mark.parametrize("family", [each.name for each in available()])
def test_every_family(family, name):
    try:
        plan = plan_of(name, model_on("cpu", family))
        two_turns("cpu", plan, family=family, decode="eager", padded=False)
    except (KvsieveError, ValueError) as error:
        # ValueError: an older transformers refuses the family's configuration.
        pytest.skip(str(error).splitlines()[0])
    ids = talk()[0][:1]
    alone = [model_on(device, family)(ids.to(device)).logits.cpu() for device in ("cpu", "cuda")]
    if (alone[0] - alone[1]).abs().max() > 1e-3:
        pytest.skip("the model itself computes something else on a GPU")
    assert_same(plan, family=family, padded=False)


@pytest.mark.parametrize("name", ["full", "snapkv", "rocketkv", "adakv", "lagkv"])
def test_tokens_come_from_a_graph(name):
    told = assert_same(plan_of(name, model_on("cpu")), decode="graph", padded=False)
    assert told[0].decoding.engine == "graph", told[0].decoding


def forced(plan, decode, padded):
    """Logits of 40 given tokens, how they were computed, and the entries that were encoded meanwhile."""
    ids, mask, more = (each[: 1 + padded].cuda() for each in talk())
    found = []

    def encoded():
        return [layer.store.bodies[-1].width for layer in cache.layers]

    with kvsieve.attach(model_on("cuda"), plan, decode=decode) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask)
        before = encoded()
        for column in more.T:
            ids, mask = torch.cat([ids, column[:, None]], 1), torch.cat([mask, torch.ones_like(column[:, None])], 1)
            found.append(next_logits(sieve, cache, ids, mask).cpu())
    grown = [now - then for now, then in zip(encoded(), before, strict=True)]
    return torch.cat(found, 1), cache.turn.record.passes, grown


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("evict", ["full", "snapkv", "adakv"])
@pytest.mark.parametrize("name", CODECS)
def test_encoded_tokens_come_from_a_graph_from_block_to_block(name, evict, padded):
    plan = dataclasses.replace(
        plan_of(evict, model_on("cpu")), codec=plan_of(name, model_on("cpu"), block=8, tail=6).codec
    )
    theirs, _, wanted = forced(plan, "eager", padded)
    ours, passes, grown = forced(plan, "graph", padded)
    assert (passes.fixed, passes.captures, passes.reason) == (40, 1, None)
    assert grown == wanted and min(grown) >= 24
    # A number between two codes may get either; a block that is not read would move logits by some units.
    assert (ours - theirs).abs().max() < 0.5


def test_a_cache_saved_on_the_gpu_is_gone_on_with_on_the_cpu(tmp_path):
    ids, _, more = talk()
    plan = plan_of("snapkv", model_on("cpu"), codec=KIVI(bits=8, block=16, tail=16))
    answers = []
    with kvsieve.attach(model_on("cuda"), plan) as sieve:
        first = sieve.generate(ids[:1].cuda(), **GREEDY)
        sieve.save(first.cache, tmp_path / "chat", ids=first.sequences)
        whole = torch.cat([first.sequences.cpu(), more[:1]], 1)
        answers.append(sieve.generate(whole.cuda(), cache=first.cache, **GREEDY).sequences.cpu())
    with kvsieve.attach(model_on("cpu"), plan) as sieve:
        answers.append(sieve.generate(whole, cache=sieve.load(tmp_path / "chat").cache, **GREEDY).sequences)
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_drafts_are_verified_in_a_graph(monkeypatch, name):
    ids = talk()[0][:1]
    options = {**GREEDY, "max_new_tokens": 40}
    plan = plan_of(name, model_on("cpu"))
    with kvsieve.attach(model_on("cpu"), plan) as sieve:
        plain = sieve.generate(ids, **options)
    let_drafts_know(monkeypatch, plain.sequences.tolist())
    with kvsieve.attach(model_on("cuda"), plan, decode="graph") as sieve:
        ours = sieve.generate(ids.cuda(), draft="lookup:tokens=6", **options)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert ours.stats.drafts.accepted > 10
    assert ours.stats.decoding.engine == "graph" and ours.stats.decoding.captures <= 2


@torch.no_grad()
@pytest.mark.parametrize("view", ["snapkv:budget=24:window=4:floor=0", "kivi:tail=4", "quest:budget=16"])
def test_views_of_the_cache_draft(monkeypatch, view):
    # Tiny models are unsure of every token.
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)
    ids = talk()[0][:1].cuda()
    with kvsieve.attach(model_on("cuda"), plan_of("full", model_on("cpu")), decode="graph") as sieve:
        _, tokens = alone(sieve, ids, 20)
        plan = checked_view(view, sieve)
        _, same, row = drafted(sieve, ids, 20, lambda cache: view_drafter(sieve, cache, plan))
    assert same == tokens
    assert row.note is None and row.counts.drafted >= 8


@contextlib.contextmanager
def while_recording(work):
    """Let the model do something in each layer of a pass that is recorded."""

    def hook(*_):
        if torch.cuda.is_current_stream_capturing():
            work()

    handles = [layer.register_forward_pre_hook(hook) for layer in model_on("cuda").model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def answered(decode, **options):
    torch.manual_seed(5)
    with kvsieve.attach(model_on("cuda"), plan_of("snapkv", model_on("cpu")), decode=decode) as sieve:
        return sieve.generate(talk()[0][:1].cuda(), **{**GREEDY, **options})


def test_a_graph_that_is_garbage_does_not_end_the_recording_of_another():
    graphs = [torch.cuda.CUDAGraph()]
    counter = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graphs[0]):
        counter.add_(1)

    def leave():
        if graphs:
            cycle = [graphs.pop()]
            cycle.append(cycle)
            gc.set_threshold(1)

    before = gc.get_threshold()
    try:
        with while_recording(leave):
            ours = answered("graph")
    finally:
        gc.set_threshold(*before)
    assert not graphs
    assert (ours.stats.decoding.engine, ours.stats.decoding.reason) == ("graph", None)
    assert torch.equal(ours.sequences, answered("eager").sequences)


def test_answers_whose_graphs_are_gone_leave_room_for_others():
    # The next recording makes one anew, which stays.
    torch._C._cuda_clearCublasWorkspaces()
    with kvsieve.attach(model_on("cuda"), plan_of("snapkv", model_on("cpu")), decode="graph") as sieve:
        for _ in range(3):
            decoding = sieve.generate(talk()[0][:1].cuda(), **GREEDY).stats.decoding
            gc.collect()
            assert (decoding.engine, decoding.reason) == ("graph", None)


def test_sampling_goes_on_where_a_recording_failed():
    with while_recording(torch.cuda.synchronize):
        ours = answered("graph", do_sample=True)
    assert ours.stats.decoding.engine == "eager" and "cannot be recorded" in ours.stats.decoding.reason
    assert torch.equal(ours.sequences, answered("eager", do_sample=True).sequences)
    assert answered("graph").stats.decoding.engine == "graph"

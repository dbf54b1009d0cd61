"""Caches with recurrent states, windows and shared KV: everything a cache can do takes them along."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import DynamicCache, logging
from transformers.cache_utils import LinearAttentionLayer

import kvsieve
from kvsieve.cache.tensors import storage_bytes
from kvsieve.errors import CacheFileError, CacheStateError, InputError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf import kinds
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.cache.states import StateLayer
from kvsieve.hf.compat import CACHE
from kvsieve.hf.model.support import why_unsupported
from small import plan_of, recorder_stand_in
from tiny import greedy
from tiny_models import available, build
from toy_chats import chat_tokenizer

logging.set_verbosity_error()

RECURRENT = ["qwen3_next", "lfm2", "falcon_h1", "zamba2", "granitemoehybrid", "nemotron_h"]
# Windows beside states, windows with sinks, and layers that read another's entries.
OTHERS = [
    name
    for name in ("lfm3", "gpt_oss", "gemma3n_text", "gemma4_text")
    if name in [family.name for family in available()]
]
STARTS_AFRESH = ["jamba", "zamba"]
PADDING = 20
GREEDY = greedy(return_dict_in_generate=True, output_logits=True, max_new_tokens=4)
# Recurrent layers are computed in float32 whatever the model's dtype.
CLOSE = 1e-3
SNAPKV = kvsieve.plan("snapkv", budget=16, window=4, paper=True)
# How a role can act: at the end of a prompt, while decoding, on ragged heads, on what is read.
PLANS = ("snapkv", "adakv", "h2o", "streamingllm", "rocketkv", "quest", "perturn", "fastkv", "gemfilter", "kvzip")
SLOW = pytest.mark.slow
FEW = [RECURRENT[0], *(pytest.param(name, marks=SLOW) for name in RECURRENT[1:] + OTHERS)]
# Every plan on one family, three on the others.
ACTING = [
    (family, name)
    for family in RECURRENT + OTHERS
    for name in (PLANS if family == RECURRENT[0] else ("snapkv", "fastkv", "quest"))
]

_BUILT: dict[str, nn.Module] = {}


def built(name):
    if name not in _BUILT:
        _BUILT[name] = build(name, dtype=torch.float64)
    return _BUILT[name]


# The last two have the Mamba-2 layers of zamba2: copies and files are tried on those.
@pytest.fixture(params=[*RECURRENT[:-2], *OTHERS])
def model(request):
    return built(request.param)


@pytest.fixture(params=RECURRENT)
def recurrent(request):
    return built(request.param)


def talk(padding=PADDING, size=48):
    """A padded batch, its mask, and what is said next."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 120, (2, size), generator=made)
    mask = torch.ones_like(ids)
    ids[1, :padding], mask[1, :padding] = 0, 0
    return ids, mask, torch.randint(2, 120, (2, 9), generator=made)


def more(ids, mask, question):
    return torch.cat([ids, question], 1), torch.cat([mask, torch.ones_like(question)], 1)


def contents(cache):
    """All that is stored, and the states."""
    out = []
    for layer in cache.all_layers:
        if isinstance(layer, StoreLayer) and not layer.store.is_empty:
            store = layer.store
            out += [store.keys, store.values, store.index, *([] if store.valid is None else [store.valid])]
        if isinstance(layer, StateLayer):
            out += layer.state_tensors()
            out.append(torch.tensor([bool(each) for each in layer.has_previous_state.values()]))
    return [part.clone() for part in out]


def states(cache):
    return [part for layer in cache.all_layers if isinstance(layer, StateLayer) for part in layer.state_tensors()]


def same(one, other):
    assert len(one) == len(other) and all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


def same_answer(one, other):
    assert torch.equal(one.sequences, other.sequences)
    same(one.output.logits, other.output.logits)
    same(contents(one.cache), contents(other.cache))


def close(one, other, rows=slice(None), atol=CLOSE):
    for mine, its in zip(one.output.logits, other.output.logits, strict=True):
        torch.testing.assert_close(mine[rows], its, atol=atol, rtol=0)


def attached(model, name="snapkv", **given):
    return kvsieve.attach(model, SNAPKV if name == "snapkv" else plan_of(name, model, **given))


# Chunked prefill and padding.


@pytest.mark.parametrize(("chunk", "padding", "size"), [(1, 3, 24), (23, PADDING, 48)])
def test_chunks_shorter_than_padding_and_convolutions(model, chunk, padding, size):
    """Chunks that are all padding in a row, and of fewer tokens than a convolution sees, change nothing."""
    ids, mask, _ = talk(padding, size)
    with attached(model) as sieve:
        both = sieve.generate(ids, mask, chunk=chunk, **GREEDY)
        for row, start in ((0, 0), (1, padding)):
            alone = sieve.generate(ids[row : row + 1, start:], **GREEDY)
            close(both, alone, slice(row, row + 1))
            assert torch.equal(both.sequences[row, size:], alone.sequences[0, size - start :])
        padded = sieve.generate(ids[1:], mask[1:], chunk=chunk, **GREEDY)
        close(padded, alone)


# Rows that are repeated and change places.


@pytest.mark.parametrize(
    ("options", "chunk"), [({"num_beams": 3}, None), ({"num_beams": 4, "num_return_sequences": 2}, 16)], ids=str
)
def test_beams_are_those_of_transformers(model, options, chunk):
    """What was read in chunks is repeated with its rows, and rows change places at every token."""
    ids, mask, _ = talk()
    if model.config._attn_implementation == "eager":
        # Its eager attention turns the float64 mask of padding into numbers that float32 does not have.
        ids, mask = ids[:1], mask[:1]
    given = {**GREEDY, **options, "output_logits": False}
    wanted = model.generate(ids, attention_mask=mask, **given)
    with attached(model, "full") as sieve:
        ours = sieve.generate(ids, mask, chunk=chunk, **given)
    assert torch.equal(ours.sequences, wanted.sequences)
    torch.testing.assert_close(ours.output.sequences_scores, wanted.sequences_scores, atol=CLOSE, rtol=0)
    with attached(model) as sieve:
        same(
            [sieve.generate(ids, mask, chunk=16, **given).sequences],
            [sieve.generate(ids, mask, chunk=44, **given).sequences],
        )


def test_rows_are_selected_and_repeated(model):
    ids, mask, question = talk()
    with attached(model) as sieve:
        cache = sieve.prefill(ids, mask)
        one = cache.fork()
        one.batch_select_indices(torch.tensor([1]))
        three = cache.fork()
        three.batch_repeat_interleave(2)
        three.batch_select_indices(torch.tensor([0, 2, 3]))
        whole, real = more(ids, mask, question)
        both = sieve.generate(whole, real, cache=cache, **GREEDY)
        close(both, sieve.generate(whole[1:], real[1:], cache=one, **GREEDY), slice(1, None))
        rows = torch.tensor([0, 1, 1])
        found = sieve.generate(whole[rows], real[rows], cache=three, **GREEDY)
        close(found, _only(both, rows))


def _only(result, rows):
    result.output.logits = tuple(part[rows] for part in result.output.logits)
    return result


# Copies.


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "h2o"])
def test_snapshots_bring_everything_back(model, name):
    if why_unsupported(model, plan_of(name, model)) is not None:
        assert name == "fastkv" and model.config.num_kv_shared_layers
        return
    ids, mask, question = talk()
    whole, real = more(ids, mask, question)
    with attached(model, name) as sieve:
        cache = sieve.prefill(ids, mask)
        held, size, taken = contents(cache), cache.nbytes(), cache.snapshot()
        wanted = sieve.generate(whole, real, cache=sieve.prefill(ids, mask), **GREEDY)
        for length in (1, 9):
            found = sieve.generate(whole[:, : 48 + length], real[:, : 48 + length], cache=cache, **GREEDY)
            cache.rollback(taken)
            same(contents(cache), held)
            assert cache.nbytes() == size
        same(found.output.logits, wanted.output.logits)
        for error in (ZeroDivisionError, KeyboardInterrupt):
            _fails_half_way(model, sieve, cache, whole, real, error)
            cache.rollback(taken)
            same(contents(cache), held)
        same_answer(sieve.generate(whole, real, cache=cache, **GREEDY), wanted)
        # A later snapshot is not disturbed by what follows an earlier one.
        later, then = cache.snapshot(), contents(cache)
        cache.rollback(taken)
        sieve.generate(whole[:, :50], real[:, :50], cache=cache, **GREEDY)
        cache.rollback(later)
        same(contents(cache), then)


def _fails_half_way(model, sieve, cache, ids, mask, error):
    """A pass that ends in the last layer, when the others have moved on."""

    def fail(*args):
        raise error

    handle = model.get_decoder().layers[-1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(error):
            sieve.prefill(ids, mask, cache=cache)
    finally:
        handle.remove()
    assert cache.status == "broken"
    with pytest.raises(CacheStateError, match="failed half-way"):
        sieve.prefill(ids, mask, cache=cache)


def test_forks_go_their_own_ways(model):
    ids, mask, question = talk(0)
    whole, real = more(ids, mask, question)
    other = torch.cat([ids, question.flip(1)], 1)
    with attached(model) as sieve:
        cache = sieve.prefill(ids, mask)
        held = contents(cache)
        wanted = [sieve.generate(each, real, cache=sieve.prefill(ids, mask), **GREEDY) for each in (whole, other)]
        forks = [cache.fork() for _ in wanted]
        tokens = [each.sequences[:, 48:] for each in wanted]
        seen = [[], []]
        with torch.no_grad():
            # In turns, a token at a time.
            for at in range(9, 12):
                for number, fork in enumerate(forks):
                    if at == 9:
                        sieve.prefill((whole, other)[number], real, cache=fork)
                    fed = tokens[number][:, at : at + 1]
                    out = model(fed, **{CACHE: fork})
                    seen[number].append(out.logits[:, -1])
        for mine, theirs in zip(seen, wanted, strict=True):
            torch.testing.assert_close(
                torch.stack(mine).float(), torch.stack(theirs.output.logits[1:]), atol=CLOSE, rtol=0
            )
        same(contents(cache), held)


@pytest.mark.parametrize("plan", ["snapkv", "fastkv", "rocketkv"])
def test_a_saved_conversation_goes_on_to_the_bit(model, tmp_path, plan):
    if why_unsupported(model, plan_of(plan, model)) is not None:
        return
    ids, mask, question = talk()
    path = tmp_path / "talk.safetensors"
    with attached(model, plan) as sieve:
        first = sieve.generate(ids, mask, **GREEDY)
        sieve.save(first.cache, path, ids=first.sequences)
        read = sieve.load(path)
        same(contents(read.cache), contents(first.cache))
        whole = torch.cat([read.ids, question], 1)
        real = torch.cat([mask, torch.ones(2, whole.shape[1] - 48, dtype=mask.dtype)], 1)
        again = sieve.generate(whole, real, cache=read.cache, **GREEDY)
        same_answer(again, sieve.generate(whole, real, cache=first.cache, **GREEDY))
        # Nothing of it is shared with the file's other readers.
        held = contents(sieve.load(path).cache)
        same(contents(sieve.load(path).cache), held)


def test_a_file_of_other_weights_is_refused(model, tmp_path):
    path = tmp_path / "talk.safetensors"
    with attached(model) as sieve:
        sieve.save(sieve.prefill(talk()[0]), path)
    other = build(model.config.model_type, dtype=torch.float64, seed=1)
    with attached(other) as sieve, pytest.raises(CacheFileError, match="other weights"):
        sieve.load(path)


def test_another_models_file_is_refused(tmp_path):
    path = tmp_path / "talk.safetensors"
    ids, mask, _ = talk()
    with attached(built("qwen3_next")) as sieve:
        sieve.save(sieve.prefill(ids, mask), path)
    for name in ("lfm2", "granitemoehybrid"):
        with attached(built(name)) as sieve, pytest.raises(CacheFileError):
            sieve.load(path)


def test_bytes_count_states_and_reset_forgets_them(model):
    ids, mask, _ = talk()
    with attached(model) as sieve:
        result = sieve.generate(ids, mask, **GREEDY)
        cache = result.cache
        stores = [
            part for layer in cache.all_layers if isinstance(layer, StoreLayer) for part in layer.store.all_tensors()
        ]
        beside = storage_bytes(states(cache))
        assert result.stats.kv_bytes == cache.nbytes() >= storage_bytes(stores) + beside
        assert bool(beside) == (model.config.model_type in [*RECURRENT, "lfm3"])
        cache.reset()
        assert cache.nbytes() == 0 and cache.num_seen == 0 and not states(cache)
        same_answer(sieve.generate(ids, mask, cache=cache, **GREEDY), sieve.generate(ids, mask, **GREEDY))


# Conversations.

CHATTING = {"suppress_tokens": [0, 1, 2], "min_new_tokens": 4, "max_new_tokens": 5, "chunk": 16}


def said():
    return [" ".join(f"w{(7 * at + each) % 80}" for each in range(30)) for at in range(2)]


@pytest.mark.parametrize("plan", ["snapkv", "fastkv"])
def test_a_chat_and_a_turn_of_it_that_fails(model, plan):
    if why_unsupported(model, plan_of(plan, model)) is not None:
        return

    def stop(piece):
        raise ZeroDivisionError

    with attached(model, plan) as sieve:
        one, other = (sieve.chat(chat_tokenizer(), **CHATTING) for _ in range(2))
        for message in said():
            held, before = contents(one.cache), one.ids
            with pytest.raises(ZeroDivisionError):
                one.ask("w1 w2 w3", on_text=stop)
            same(contents(one.cache), held)
            assert torch.equal(one.ids, before)
            assert one.ask(message).text == other.ask(message).text
        same(contents(one.cache), contents(other.cache))
        fork = one.fork()
        assert fork.ask("w5 w6").text == one.ask("w5 w6").text


def test_a_chat_fed_once_answers_as_one_that_is_read_anew(model):
    with attached(model, "full") as sieve:
        chat = sieve.chat(chat_tokenizer(), **CHATTING)
        for message in said():
            chat.ask(message)
        ids = chat.ids[:, :-1]
        cache = sieve.prefill(ids)
        found, wanted = (sieve.generate(chat.ids, cache=each, **GREEDY) for each in (chat.cache, cache))
        # Of some models transformers itself computes a single token otherwise than several.
        close(found, wanted, atol=0.1)


# What plans do.


@pytest.mark.parametrize(("family", "name"), ACTING)
def test_plans_act_and_rows_and_chunks_agree(family, name):
    model, (ids, mask, _) = built(family), talk(7)
    plan = plan_of(name, model)
    if why_unsupported(model, plan) is not None:
        assert family in OTHERS
        return
    if name == "kvzip" and family in [*RECURRENT, "lfm3"]:
        # What it repeats is of another length in each row.
        with kvsieve.attach(model, plan) as sieve, pytest.raises(InputError, match="padding behind its tokens"):
            sieve.generate(ids, mask, **GREEDY)
        ids, mask, _ = talk(0)
    padding, few = 7 if mask.min() == 0 else 0, {**GREEDY, "max_new_tokens": 3}
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.generate(ids, mask, **few)
        assert both.stats.applied
        close(both, sieve.generate(ids[1:, padding:], **few), slice(1, None))
        close(sieve.generate(ids, mask, chunk=13, **few), both)
        asked = sieve.generate(ids, mask, question_tokens=5, **{**few, "max_new_tokens": 1})
        assert asked.stats.applied and asked.cache.turn.record.question == 5
        whole = sieve.prefill(ids, mask, reduce=False)
        assert {whole.entries()[index] for index in whole.sieve_layers} == {48}


@pytest.mark.parametrize("name", ["kvzip", "lookahead"])
@pytest.mark.parametrize("family", FEW)
def test_probing_leaves_the_states_alone(family, name):
    """Branches of a cache write to states of their own, and to windows of their own."""
    model, ids = built(family), talk(0)[0]
    plan = plan_of(name, model)
    with attached(model, "full") as sieve:
        full = sieve.prefill(ids, chunk=16)
        wanted = sieve.generate(ids, **{**GREEDY, "max_new_tokens": 1})
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids, chunk=16)
        # The first token is that of full KV.
        close(sieve.generate(ids, **{**GREEDY, "max_new_tokens": 1}), wanted)
    assert max(cache.entries()[index] for index in cache.sieve_layers) < 48
    for mine, its in zip(states(cache), states(full), strict=True):
        torch.testing.assert_close(mine, its, atol=CLOSE, rtol=1e-3)
    for index, layer in enumerate(cache.all_layers):
        if isinstance(layer, StoreLayer) and index not in cache.sieve_layers:
            own = full.all_layers[index]
            # All that the next token can see.
            assert torch.equal(layer.store.index[:, :, -15:], own.store.index[:, :, -15:])
            ours, theirs = layer.store.keys[:, :, -15:], own.store.keys[:, :, -15:]
            torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=1e-3)


@pytest.mark.parametrize("plan", [kvsieve.plan("gemfilter", budget=16, layer=1), None], ids=["gemfilter", "asl"])
@pytest.mark.parametrize("family", FEW)
def test_a_short_prompt_is_read_by_fresh_layers(family, plan):
    """Nothing of the first pass is left: the answer is that of the chosen tokens as a prompt of their own."""
    model, (ids, mask, _) = built(family), talk(0)
    plan = plan or kvsieve.plan("asl", budget=24, tau=1e9, observed=2, first=1, window=4, two_pass=True)
    with kvsieve.attach(model, plan) as sieve:
        found = sieve.generate(ids, mask, **GREEDY)
    short = found.cache.conversation.short_prompt
    assert short is not None and short.token_index.shape[1] < 48
    with attached(model, "full") as sieve:
        wanted = sieve.generate(ids.gather(1, short.token_index), **GREEDY)
    if plan.evict is None:
        close(found, wanted)
        for mine, its in zip(states(found.cache), states(wanted.cache), strict=True):
            torch.testing.assert_close(mine, its, atol=CLOSE, rtol=1e-3)


def test_a_cache_is_adopted(recurrent):
    ids, mask, question = talk()
    whole, real = more(ids, mask, question)
    with attached(recurrent, "full") as sieve:
        cache = sieve.prefill(ids, mask)
        held = contents(cache)
        fork = cache.fork()
    with attached(recurrent) as sieve:
        found = sieve.generate(whole, real, cache=sieve.adopt(fork), **GREEDY)
        assert max(found.stats.kv_entries) == 16
        wanted = sieve.generate(whole, real, cache=sieve.prefill(ids, mask, reduce=False), **GREEDY)
        close(found, wanted)
    same(contents(cache), held)


# What is refused, and when.


def test_rows_with_padding_behind_their_tokens_are_refused(recurrent):
    ids, mask, question = talk()
    with attached(recurrent) as sieve:
        cache = sieve.prefill(ids, mask)
        taken = cache.snapshot()
        whole, real = more(ids, mask, question)
        real[1, 48:51] = 0
        with pytest.raises(InputError, match="padding behind its tokens"):
            sieve.generate(whole, real, cache=cache, **GREEDY)
        cache.rollback(taken)
        changed = more(ids, mask, question)[1]
        changed[0, 3] = 0
        with pytest.raises(InputError, match=r"cannot take back|padding behind"):
            sieve.generate(whole, changed, cache=cache, **GREEDY)
        cache.rollback(taken)
        sieve.generate(whole, more(ids, mask, question)[1], cache=cache, **GREEDY)


@pytest.mark.parametrize("name", STARTS_AFRESH)
def test_models_that_start_afresh_are_told_by_their_states(name):
    """transformers' own code forgets the state between parts of a prompt, and says nothing."""
    for seed in range(3):
        model, ids = build(name, dtype=torch.float64, seed=seed), talk(0)[0]
        with attached(model) as sieve:
            with pytest.raises(UnsupportedOptionError, match="forgets its recurrent state"):
                sieve.generate(ids, chunk=16, **GREEDY)
            cache = sieve.generate(ids, **GREEDY).cache
            with pytest.raises(UnsupportedOptionError, match="with a new cache"):
                sieve.prefill(torch.cat([ids, ids[:, :10]], 1), cache=cache)


def test_finch_is_refused(recurrent):
    reason = why_unsupported(recurrent, kvsieve.plan("finch", budget=24, question_tokens=5))
    assert reason is not None and ("recurrent in " in reason or "rotary embedding" in reason)


class _Strange(LinearAttentionLayer):
    """A layer of another package: what it holds, and whether that can be copied, is not known."""


class _Keeps(LinearAttentionLayer):
    pass


def test_layers_of_unknown_kinds_are_refused_at_attach(monkeypatch):
    model, plain = built("qwen3_next"), kinds.plain_cache_layers

    def strange(config):
        return [_Strange() if isinstance(layer, LinearAttentionLayer) else layer for layer in plain(config)]

    monkeypatch.setattr(kinds, "plain_cache_layers", strange)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 is of a kind .* _Strange"), attached(model):
        pass
    assert not any(module._forward_hooks for module in model.modules())


def test_a_state_that_cannot_be_copied_is_refused_at_attach(monkeypatch):
    """A release of transformers whose recurrent layers keep more than is known."""
    before = LinearAttentionLayer.__init__

    def keeps_more(self, *args, **kwargs):
        before(self, *args, **kwargs)
        self.momentum_states = dict.fromkeys(range(1))

    model = built("qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(LinearAttentionLayer, "__init__", keeps_more)
        with (
            pytest.raises(UnsupportedModelError, match="layer 0 is recurrent and keeps momentum_states"),
            attached(model),
        ):
            pass
    assert why_unsupported(model, SNAPKV) is None


def test_every_field_of_a_state_is_known():
    """Of the installed transformers: else hybrids would be refused, and this says why."""
    layer = LinearAttentionLayer()
    assert set(kinds.STATE_FIELDS) <= vars(layer).keys()
    assert any(isinstance(each, LinearAttentionLayer) for each in DynamicCache(config=built("lfm2").config).layers)


def test_states_outside_the_cache_are_refused_at_the_first_pass(monkeypatch):
    """Nothing could roll them back."""
    model = built("lfm2")
    monkeypatch.setattr(StateLayer, "update_conv_state", lambda self, states, *args, **kwargs: states)
    with attached(model) as sieve, pytest.raises(UnsupportedModelError, match="layer 0 .* outside the cache"):
        sieve.prefill(talk(0)[0])


@pytest.mark.parametrize("family", FEW)
def test_fixed_shapes_are_refused_with_a_reason(family):
    model, ids = built(family), talk(0)[0]
    with recorder_stand_in(), kvsieve.attach(model, SNAPKV, decode="graph") as sieve:
        decoding = sieve.generate(ids, **GREEDY).stats.decoding
    assert decoding.engine == "eager" and decoding.reason is not None and len(decoding.reason) > 20, decoding


def test_no_warnings(recurrent):
    ids, mask, _ = talk()
    with warnings.catch_warnings(), attached(recurrent) as sieve:
        warnings.simplefilter("error")
        sieve.generate(ids, mask, chunk=16, **GREEDY)

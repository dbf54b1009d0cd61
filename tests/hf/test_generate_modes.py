"""generate's own arguments under a plan, later turns, refusals, bad input, and leaving no trace."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import BaseStreamer, StoppingCriteria

import kvsieve
from kvsieve.errors import CacheStateError, InputError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward import passes, sparse_prompt
from kvsieve.hf.generate import peak_memory
from tiny import padded_prompt, tiny_prompt
from tiny_models import build

PLAIN = {"eos_token_id": None, "pad_token_id": 0}
FULL = kvsieve.plan("full")
SNAPKV = kvsieve.plan("snapkv", budget=16, window=4, paper=True)


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(40, 7, seed=5)


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.4},
    "criteria": {"do_sample": False, "stopping_criteria": [StopAt(43)]},
}


@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_full_kv_is_the_models_own_generate(model, prompts, mode, chunk):
    ids, mask = prompts
    torch.manual_seed(1)
    reference = model.generate(ids, attention_mask=mask, max_new_tokens=8, **PLAIN, **MODES[mode])
    with kvsieve.attach(model, FULL) as sieve:
        torch.manual_seed(1)
        result = sieve.generate(ids, mask, chunk=chunk, max_new_tokens=8, **PLAIN, **MODES[mode])
    assert torch.equal(result.sequences, reference)


@pytest.mark.parametrize("mode", ["three samples", "beams"])
def test_rows_are_repeated_when_the_prompt_was_read_in_chunks(model, prompts, mode):
    """Evicting once and repeating rows equals evicting repeated rows."""
    ids, mask = prompts
    with kvsieve.attach(model, SNAPKV) as sieve:
        results = []
        for chunk in (None, 9):
            torch.manual_seed(2)
            results.append(sieve.generate(ids, mask, chunk=chunk, max_new_tokens=8, **PLAIN, **MODES[mode]))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert results[1].stats.kv_entries == [16] * 4


def test_streamers_and_stop_strings(model, prompts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    bytes_ = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_)
    ids = prompts[0][:1]
    plain = model.generate(ids, max_new_tokens=8, do_sample=False, **PLAIN)
    stop = tokenizer.decode(plain[0, 42:43])
    streamer = Collect()
    with kvsieve.attach(model, FULL) as sieve:
        options = {"max_new_tokens": 8, "do_sample": False, "stop_strings": [stop], "tokenizer": tokenizer}
        result = sieve.generate(ids, streamer=streamer, chunk=16, **options, **PLAIN)
    assert result.sequences.shape[1] <= 43 and torch.equal(result.sequences[0], plain[0, : result.sequences.shape[1]])
    assert streamer.tokens == [*result.sequences[0].tolist(), "end"]


def test_plain_calls_inside_the_block_follow_the_plan(model, prompts):
    ids, mask = prompts
    with kvsieve.attach(model, SNAPKV) as sieve:
        ours = sieve.generate(ids, mask, max_new_tokens=5, do_sample=False, **PLAIN)
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, **PLAIN
        )
        with torch.no_grad():
            output = model(ids, attention_mask=mask)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert theirs[CACHE].entries() == [20] * 4 and output[CACHE].entries() == [16] * 4


@pytest.mark.parametrize("given", [True, False], ids=["mask-given", "mask-known"])
def test_a_second_turn_of_a_padded_batch_is_one_long_prompt(model, prompts, given):
    ids, mask = prompts
    more = tiny_prompt(2, 11, seed=6)
    greedy = {"max_new_tokens": 6, "do_sample": False, **PLAIN}
    with kvsieve.attach(model, FULL) as sieve:
        first = sieve.generate(ids, mask, **greedy)
        talk = torch.cat([first.sequences, more], 1)
        talk_mask = torch.cat([mask, torch.ones(2, 17, dtype=mask.dtype)], 1)
        second = sieve.generate(talk, talk_mask if given else None, cache=first.cache, chunk=4, **greedy)
    assert torch.equal(second.sequences, model.generate(talk, attention_mask=talk_mask, **greedy))
    assert second.stats.prompt_tokens == 57


def test_a_later_mask_can_hide_what_was_stored(model, prompts):
    ids, mask = prompts
    greedy = {"max_new_tokens": 6, "do_sample": False, **PLAIN}
    hidden = mask.clone()
    hidden[0, 10:20] = 0
    with kvsieve.attach(model, FULL) as sieve:
        cache = sieve.prefill(ids[:, :30], mask[:, :30])
        ours = sieve.generate(ids, hidden, cache=cache, **greedy)
    theirs = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = (mask[:, :30].cumsum(-1) - 1).clamp_min(0)
        model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions, **{CACHE: theirs})
    reference = model.generate(ids, attention_mask=hidden, **{CACHE: theirs}, **greedy)
    assert torch.equal(ours.sequences, reference)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_is_filled_by_whichever_name_it_is_given(model, prompts, name):
    ids = prompts[0][:1]
    with kvsieve.attach(model, SNAPKV) as sieve, torch.no_grad():
        calls = {
            "model": lambda cache: model(ids, **{name: cache}).logits[:, -1],
            "decoder": lambda cache: model.model(ids, **{name: cache})[0][:, -1],
            "generate": lambda cache: model.generate(ids, **{name: cache}, max_new_tokens=2, do_sample=False, **PLAIN),
        }
        for what, call in calls.items():
            cache = sieve.new_cache()
            assert torch.equal(call(cache), call(None)), what
            assert cache.entries() == [16 + (what == "generate")] * 4, what


def test_a_second_turn_evicts_again_and_positions_go_on(model, prompts):
    ids = prompts[0][:1]
    more = tiny_prompt(1, 11, seed=6)
    with kvsieve.attach(model, SNAPKV) as sieve:
        first = sieve.generate(ids, max_new_tokens=6, do_sample=False, **PLAIN)
        assert first.cache.entries() == [16 + 5] * 4 and first.cache.get_seq_length() == 45
        talk = torch.cat([first.sequences, more], 1)
        second = sieve.generate(talk, cache=first.cache, max_new_tokens=2, do_sample=False, **PLAIN)
    assert second.stats.applied and second.stats.kv_entries == [16] * 4
    store = second.cache.layers[2].store
    assert store.index[0, 1, -5:].tolist() == [53, 54, 55, 56, 57]
    assert second.cache.memory_report()["tokens_seen"] == 58


def test_stats_tell_what_happened(model, prompts):
    ids, mask = prompts
    with kvsieve.attach(model, SNAPKV) as sieve:
        stats = sieve.generate(ids, mask, max_new_tokens=4, do_sample=False, **PLAIN).stats
    assert (stats.method, stats.applied, stats.prompt_tokens, stats.deep_tokens) == ("snapkv", True, 40, 40)
    assert (stats.kv_entries, stats.kv_asked, stats.new_tokens, stats.notes) == ([16] * 4, 16, 4, [])
    assert stats.ttft_s > 0 and stats.tpot_s > 0 and stats.peak_bytes is None


def test_memory_is_measured_when_it_is_asked_for(model, prompts, monkeypatch):
    """Measuring collects garbage and resets the process's peak, which a service does not want at every call."""
    ids, mask = prompts
    collected = []
    monkeypatch.setattr(peak_memory.gc, "collect", lambda: collected.append(True))
    options = {"max_new_tokens": 2, "do_sample": False, **PLAIN}
    with kvsieve.attach(model, SNAPKV) as sieve:
        assert sieve.generate(ids, mask, **options).stats.peak_bytes is None and not collected
        measured = sieve.generate(ids, mask, measure=True, **options).stats.peak_bytes
    assert collected and (measured is None or measured > 10**7)


REFUSED = {
    "cache_implementation": "static",
    "prefill_chunk_size": 8,
    "use_cache": False,
    "output_attentions": True,
    "past_key_values": DynamicCache(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_honoured_are_refused(model, prompts, name):
    with kvsieve.attach(model, SNAPKV) as sieve, pytest.raises(UnsupportedOptionError, match=name):
        sieve.generate(prompts[0][:1], max_new_tokens=2, **{name: REFUSED[name]})


def test_calls_that_cannot_be_honoured_are_refused(model, prompts):
    ids = prompts[0][:1]
    with kvsieve.attach(model, SNAPKV) as sieve, torch.no_grad():
        foreign = {CACHE: DynamicCache(config=model.config)}
        with pytest.raises(UnsupportedOptionError, match="DynamicCache, on which 'snapkv' could not run"):
            model.generate(ids, **foreign, max_new_tokens=2, **PLAIN)
        with pytest.raises(UnsupportedOptionError, match="DynamicCache, on which 'snapkv' could not run"):
            model(ids, **foreign)
        with pytest.raises(UnsupportedOptionError, match="2-D"):
            model(ids, attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))
        with pytest.raises(UnsupportedOptionError, match="use_cache=False"):
            model(ids, use_cache=False)
        with pytest.raises(InputError, match="1 columns are to be taken back, and 0 were fed"):
            sieve.new_cache().crop(-1)
        model.train()
        try:
            with pytest.raises(UnsupportedOptionError, match="training mode"):
                model(ids)
        finally:
            model.eval()


def test_bad_input_is_named(model, prompts):
    ids, mask = prompts
    with kvsieve.attach(model, SNAPKV) as sieve:
        cache = sieve.prefill(ids, mask)
        for match, arguments in {
            r"the prompt is empty: input_ids of shape \(1, 0\)": (ids[:1, :0],),
            r"must be a tensor \[batch, tokens\], got \(40,\)": (ids[0],),
            r"attention_mask has shape \(2, 39\), expected \(2, 40\)": (ids, mask[:, 1:]),
            "row 1 of the batch is all padding": (ids, mask * torch.tensor([[1], [0]])),
            "padded on the right": (ids, mask.flip(1)),
            "the prompt has 600 tokens, the model's context ends at 512": (torch.ones(1, 600, dtype=torch.long),),
            "the cache has seen 40 tokens and input_ids holds 40": (ids, mask, cache),
            "the cache holds 2 rows and got an input of 1": (torch.cat([ids, ids], 1)[:1], None, cache),
        }.items():
            with pytest.raises(InputError, match=match):
                sieve.generate(*arguments[:2], cache=arguments[2] if len(arguments) > 2 else None, max_new_tokens=2)
        with pytest.raises(InputError, match="chunk must be a whole number of at least 1 token, or None, got 0"):
            sieve.generate(ids, mask, chunk=0, max_new_tokens=2)


def hooks(model) -> int:
    """Return how many hooks the model has; transformers leaves some of its own on one that gave hidden states."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_pass_that_failed_spoils_its_cache_and_leaves_no_trace(model, prompts, error):
    ids = prompts[0][:1]
    before = model.generate(ids, max_new_tokens=4, do_sample=False, **PLAIN)
    found, hooked = model.config._attn_implementation, hooks(model)

    def fail(*arguments):
        raise error

    with pytest.raises(type(error)):
        with kvsieve.attach(model, kvsieve.plan("fastkv", tsp_layer=1, window=4)) as sieve:
            cache = sieve.new_cache()
            handle = model.model.layers[2].register_forward_hook(fail)
            with pytest.raises(type(error)):
                sieve.generate(ids, cache=cache, max_new_tokens=2, **PLAIN)
            handle.remove()
            with pytest.raises(CacheStateError, match="failed half-way"):
                sieve.generate(ids, cache=cache, max_new_tokens=2, **PLAIN)
            assert sieve.generate(ids, max_new_tokens=2, **PLAIN).stats.applied
            raise error
    assert hooks(model) == hooked and model.config._attn_implementation == found
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, **PLAIN), before)


def test_one_plan_at_a_time(model):
    hooked = hooks(model)
    with kvsieve.attach(model, FULL):
        with pytest.raises(kvsieve.KvsieveError, match="attached already"), kvsieve.attach(model, FULL):
            pass
    assert hooks(model) == hooked


def test_an_interrupt_in_the_middle_of_a_pass_leaves_nothing_behind(monkeypatch):
    """torch calls no hook then: the session would stay open, and hold on to its cache."""
    model, ids = build("llama", dtype=torch.float64), torch.randint(2, 120, (1, 30))
    with kvsieve.attach(model, kvsieve.plan("hsa", budget=16)) as sieve:
        wanted = sieve.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None).sequences
        cache = sieve.new_cache()
        with monkeypatch.context() as broken:
            broken.setattr(sparse_prompt, "attend", interrupt)
            with pytest.raises(KeyboardInterrupt):
                sieve.generate(ids, cache=cache, max_new_tokens=4, pad_token_id=0)
        assert passes.current() is None and cache.status == "broken"
        with pytest.raises(CacheStateError, match="failed half-way"):
            sieve.generate(ids, cache=cache, max_new_tokens=4, pad_token_id=0)
        again = sieve.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None).sequences
    assert torch.equal(again, wanted)


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt

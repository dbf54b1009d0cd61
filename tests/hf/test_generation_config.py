"""What the call and the checkpoint's generation_config say is obeyed, or refused with who said it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

import kvsieve
from kvsieve.cli.answers import EncodedPrompt, Generation, run_methods
from kvsieve.cli.specs import MethodRun
from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.generate import drafted
from kvsieve.hf.generate.config import FROM_HUB, REFUSED, config_in_effect, end_tokens, padding_token, processors_of
from kvsieve.lab.bench.contenders import KvsieveMethod
from kvsieve.lab.bench.prompts import TokensPrompt
from small import fill
from tiny import tiny_model, tiny_prompt
from tiny_models import build
from toy_bytes import byte_level
from toy_chats import chat_tokenizer

FULL = kvsieve.plan("full")
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def shared():
    return tiny_model(filled=True)


@pytest.fixture
def model(shared):
    """With a configuration of its own, which a test may change."""
    kept = shared.generation_config
    shared.generation_config = copy.deepcopy(kept)
    yield shared
    shared.generation_config = kept


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 30, seed=5, low=10)


@pytest.fixture(scope="module")
def said(shared, ids):
    """Tokens of the answer when nothing is asked for."""
    return shared.generate(ids, **GREEDY, eos_token_id=None)[0, 30:].tolist()


# By attribute, a value that changes or may change the answer, given the plain answer's tokens.
OBEYED = {
    "max_new_tokens": lambda said: 3,
    "max_length": lambda said: 33,
    "min_length": lambda said: 36,
    "min_new_tokens": lambda said: 6,
    "eos_token_id": lambda said: [said[3], said[2]],
    "pad_token_id": lambda said: 5,
    "bos_token_id": lambda said: 1,
    "num_beams": lambda said: 2,
    "num_return_sequences": lambda said: 1,
    "early_stopping": lambda said: True,
    "length_penalty": lambda said: 0.5,
    "max_time": lambda said: 1e-9,
    "do_sample": lambda said: True,
    "temperature": lambda said: 0.7,
    "top_k": lambda said: 5,
    "top_p": lambda said: 0.5,
    "min_p": lambda said: 0.2,
    "top_h": lambda said: 0.4,
    "typical_p": lambda said: 0.5,
    "epsilon_cutoff": lambda said: 1e-3,
    "eta_cutoff": lambda said: 1e-3,
    "repetition_penalty": lambda said: 1.8,
    "encoder_repetition_penalty": lambda said: 1.8,
    "no_repeat_ngram_size": lambda said: 1,
    "encoder_no_repeat_ngram_size": lambda said: 1,
    "bad_words_ids": lambda said: [[said[0]], said[2:4]],
    "renormalize_logits": lambda said: True,
    "forced_bos_token_id": lambda said: 7,
    "forced_eos_token_id": lambda said: 9,
    "remove_invalid_values": lambda said: True,
    "exponential_decay_length_penalty": lambda said: (2, 1.5),
    "suppress_tokens": lambda said: said[:3],
    "begin_suppress_tokens": lambda said: said[:1],
    "sequence_bias": lambda said: [[[said[0]], -9.0]],
    "guidance_scale": lambda said: 2.0,
    "watermarking_config": lambda said: {"bias": 9.0, "seeding_scheme": "selfhash"},
    "output_hidden_states": lambda said: True,
    "output_scores": lambda said: True,
    "output_logits": lambda said: True,
    "return_dict_in_generate": lambda said: True,
    "use_cache": lambda said: True,
    "cache_implementation": lambda said: "dynamic",
    "stop_strings": lambda said: None,
    "prompt_lookup_num_tokens": lambda said: 3,
}
# No effect on a decoder-only model that is not assisted, or on a cache that is given.
WITHOUT_EFFECT = {
    "decoder_start_token_id",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "low_memory",
    "diversity_penalty",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "speculation_type",
    "_from_model_config",
    "transformers_version",
}
REFUSED_VALUES = {
    "assistant_early_exit": 1,
    "use_mtp": True,
    "cache_implementation": "static",
    "prefill_chunk_size": 8,
    "output_attentions": True,
    "token_healing": True,
    "use_cache": False,
    "constraints": [object()],
    "force_words_ids": [[3]],
    "dola_layers": "low",
    "penalty_alpha": 0.6,
    "num_beam_groups": 2,
}


def test_every_attribute_of_a_configuration_is_accounted_for():
    """An attribute that a release of transformers brings must be tried here, or refused."""
    known = OBEYED.keys() | WITHOUT_EFFECT | REFUSED_VALUES.keys()
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} - known == set()
    hub = {name for names in FROM_HUB.values() for name in names}
    # generate takes the lookup as draft=; a server refuses it.
    assert (REFUSED.keys() | hub | {"use_cache"}) - {"prompt_lookup_num_tokens"} == REFUSED_VALUES.keys()


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole", "chunks"])
@pytest.mark.parametrize("by", ["call", "model"])
@pytest.mark.parametrize("name", OBEYED)
def test_full_kv_obeys_what_transformers_obeys(model, ids, said, name, by, chunk):
    value = OBEYED[name](said)
    options = {name: each for name, each in (GREEDY | {"eos_token_id": 127}).items()}
    if name in ("max_length", "max_new_tokens"):
        options.pop("max_new_tokens")
    if name in ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"):
        options["do_sample"] = True
    options.pop(name, None)
    if by == "call":
        options |= {} if value is None else {name: value}
    else:
        setattr(model.generation_config, name, value)
        if name == "watermarking_config":
            model.generation_config.update(watermarking_config=value)
    torch.manual_seed(1)
    wanted = model.generate(ids, **options)
    with kvsieve.attach(model, FULL) as sieve:
        torch.manual_seed(1)
        found = sieve.generate(ids, chunk=chunk, **options)
    assert torch.equal(found.sequences, getattr(wanted, "sequences", wanted))


@pytest.mark.parametrize("path", ["sieve", "model.generate"])
@pytest.mark.parametrize("by", ["call", "config of the call", "model"])
@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_what_cannot_be_honoured_is_refused_with_who_says_it(model, ids, name, by, path):
    value, options = REFUSED_VALUES[name], dict(GREEDY)
    if name in ("num_beam_groups", "constraints", "force_words_ids"):
        options["num_beams"] = 2
    if by == "call":
        options[name], match = value, rf"generate\({name}="
    elif by == "model":
        setattr(model.generation_config, name, value)
        match = rf"model\.generation_config\.{name}="
    else:
        config = GenerationConfig(**options)
        setattr(config, name, value)
        options, match = {"generation_config": config}, rf"^generation_config\.{name}="
    with kvsieve.attach(model, FULL) as sieve, pytest.raises(UnsupportedOptionError, match=match):
        (sieve.generate if path == "sieve" else model.generate)(ids, **options)


@pytest.mark.parametrize("name", ["dynamic", "hybrid"])
@pytest.mark.parametrize("by", ["call", "model"])
def test_a_growing_cache_is_what_a_plan_has_anyway(model, ids, name, by):
    wanted = model.generate(ids, **GREEDY)
    options = dict(GREEDY)
    if by == "call":
        options["cache_implementation"] = name
    else:
        model.generation_config.cache_implementation = name
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        assert torch.equal(sieve.generate(ids, **options).sequences, wanted)
        assert torch.equal(model.generate(ids, **options), wanted)


def padded():
    """Two rows: the second begins with six tokens 5, and the first has the token 0 within its text."""
    ids = tiny_prompt(2, 30, seed=5, low=10)
    ids[1, :6], ids[0, 12] = 5, 0
    return ids


# Where pad and end tokens are said. The checkpoint has 0 and 127.
MASKS = {
    "nothing": {},
    "pad of the call": {"pad_token_id": 5},
    "pad equal to the end": {"pad_token_id": 0, "eos_token_id": 0},
    "pad among the ends": {"pad_token_id": 5, "eos_token_id": [9, 5]},
    "other end": {"eos_token_id": 9},
    "configuration of the call": {"generation_config": GenerationConfig(pad_token_id=5, eos_token_id=9, **GREEDY)},
    "configuration without pad": {"generation_config": GenerationConfig(eos_token_id=9, **GREEDY)},
}


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_inferred_as_generate_infers_it(model, case, chunk):
    ids = padded() if case != "pad equal to the end" else padded()[:1]
    options = MASKS[case] if "generation_config" in MASKS[case] else {**GREEDY, **MASKS[case]}
    wanted = model.generate(ids, **options)
    with kvsieve.attach(model, FULL) as sieve:
        found = sieve.generate(ids, chunk=chunk, **options)
        assert torch.equal(found.sequences, wanted)
        if case in ("nothing", "other end"):
            cache = sieve.prefill(ids, chunk=chunk)
            assert torch.equal(cache.conversation.mask, ids.ne(0))


def test_pad_and_ends_of_a_configuration():
    config = GenerationConfig(pad_token_id=5, eos_token_id=[9, 5])
    assert (padding_token(config), end_tokens(config)) == (None, [9, 5])
    config = GenerationConfig(pad_token_id=5, eos_token_id=9)
    assert (padding_token(config), end_tokens(config)) == (5, [9])
    assert (padding_token(GenerationConfig()), end_tokens(GenerationConfig())) == (None, [])


ALONE = sorted(
    OBEYED.keys() - {"guidance_scale", "num_beams", "do_sample", "max_time", "stop_strings", "max_length", "min_length"}
)


@pytest.mark.parametrize("name", ALONE)
def test_a_loop_of_its_own_answers_as_generate_does(model, ids, said, name):
    """`processors_of` and the greedy choice."""
    options = {"eos_token_id": 127, **GREEDY, name: OBEYED[name](said)}
    wanted = model.generate(ids, **{**options, "return_dict_in_generate": False})
    config = config_in_effect(model, options)
    processors, made = processors_of(model, config, ids), ids
    for _ in range(config.max_new_tokens):
        with torch.no_grad():
            scores = processors(made, model(made).logits[:, -1].float())
        made = torch.cat([made, scores.argmax(-1, keepdim=True)], 1)
        if int(made[0, -1]) in end_tokens(config):
            break
    assert torch.equal(made, wanted)


def test_a_loop_of_its_own_refuses_a_second_prompt(model, ids):
    config = config_in_effect(model, {"guidance_scale": 2.0})
    with pytest.raises(UnsupportedOptionError, match="guidance_scale.* runs the model on a second prompt"):
        processors_of(model, config, ids)


@pytest.mark.parametrize("path", ["generate", "prefill", "model.generate", "model"])
@pytest.mark.parametrize("options", [{"num_return_sequences": 3}, {}], ids=["all returned", "one returned"])
def test_the_cache_of_a_beam_search_is_not_gone_on_with(model, ids, options, path):
    """Its rows are other beams than the sequences that were returned."""
    with kvsieve.attach(model, FULL) as sieve, torch.no_grad():
        first = sieve.generate(ids, num_beams=3, **options, **GREEDY)
        talk = torch.cat([first.sequences, first.sequences[:, :5]], 1)
        wide = talk if options else talk.expand(3, -1)
        calls = {
            "generate": lambda: sieve.generate(talk, cache=first.cache, **GREEDY),
            "prefill": lambda: sieve.prefill(talk, cache=first.cache),
            "model.generate": lambda: model.generate(wide, **{CACHE: first.cache}, **GREEDY),
            "model": lambda: model(wide[:, -4:], **{CACHE: first.cache}),
        }
        with pytest.raises(CacheStateError, match="that of a beam search"):
            calls[path]()
        # Rows of samples are the sequences.
        second = sieve.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=2)
        talk = torch.cat([second.sequences, second.sequences[:, :5]], 1)
        found = sieve.generate(talk, cache=second.cache, **GREEDY).sequences
    assert torch.equal(found, model.generate(talk, **GREEDY))


WITH_POSITIONS = {
    "chunk": {"chunk": 8},
    "question": {"question_tokens": 4},
    "probing": {"plan": kvsieve.plan("kvzip", budget=20, repeat_ids=(), go_on_ids=(), answer_ids=())},
    "moved keys": {"plan": kvsieve.plan("expectedattention", budget=20)},
}


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_positions_of_the_caller_are_obeyed_or_refused(model, ids, name):
    at = torch.arange(100, 130)[None]
    wanted = model.generate(ids, position_ids=at, **GREEDY)
    with kvsieve.attach(model, FULL) as sieve:
        assert torch.equal(sieve.generate(ids, position_ids=at, **GREEDY).sequences, wanted)
    how = dict(WITH_POSITIONS[name])
    with kvsieve.attach(model, how.pop("plan", FULL)) as sieve:
        with pytest.raises(UnsupportedOptionError, match="position_ids=.*is about every token of a prompt"):
            sieve.generate(ids, position_ids=at, **how, **GREEDY)


@pytest.mark.parametrize("name", ["full", "kivi", "snapkv"])
def test_under_autocast_chunks_and_later_turns_are_those_of_one_pass(ids, name):
    plans = {"full": FULL, "kivi": kvsieve.plan("full", codec="kivi:bits=4")}
    plan = plans.get(name) or kvsieve.plan("snapkv", budget=20, window=4, paper=True)
    model = fill(build("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16), kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids, **GREEDY)
        assert first.cache.layers[0].store.keys.dtype == torch.bfloat16
        # What bfloat16 rounds to, and so the first token of one prompt of six, depends on the processor.
        prompts = [tiny_prompt(1, 30, seed=seed, low=10) for seed in range(6)]
        pairs = [[sieve.generate(each, chunk=chunk, **GREEDY).sequences for chunk in (None, 16)] for each in prompts]
        assert sum(torch.equal(whole[:, :31], chunks[:, :31]) for whole, chunks in pairs) >= 5
        talk = torch.cat([first.sequences, ids[:, :7]], 1)
        later = sieve.generate(talk, cache=first.cache, **GREEDY).sequences
        if name == "full":
            assert torch.equal(later, sieve.generate(talk, **GREEDY).sequences)


@pytest.mark.parametrize("codec", [None, "kivi:bits=4"])
@pytest.mark.parametrize("before", [True, False])
def test_a_cache_goes_on_under_autocast_where_it_was_begun_under_it(ids, before, codec):
    model, dtype = fill(build("llama")), torch.bfloat16
    with kvsieve.attach(model, kvsieve.plan("full", codec=codec)) as sieve:
        with torch.autocast("cpu", dtype=dtype, enabled=before):
            cache = sieve.prefill(ids[:, :20])
        with torch.autocast("cpu", dtype=dtype, enabled=not before), pytest.raises(CacheStateError, match="autocast"):
            sieve.generate(ids, cache=cache, **GREEDY)


def test_latent_attention_under_autocast_is_refused(ids):
    model = build("deepseek_v3")
    with torch.autocast("cpu", dtype=torch.bfloat16), kvsieve.attach(model, FULL) as sieve:
        with pytest.raises(UnsupportedOptionError, match="latent attention, which does not run under torch.autocast"):
            sieve.generate(ids, **GREEDY)


def test_a_chat_obeys_what_a_configuration_of_the_turn_says(model):
    with kvsieve.attach(model, FULL) as sieve:
        tokenizer = chat_tokenizer()
        chat = sieve.chat(tokenizer, max_new_tokens=9)
        plain = chat.fork().ask("w1 w2 w3").tokens
        config = GenerationConfig(max_new_tokens=3, do_sample=False)
        assert chat.fork().ask("w1 w2 w3", generation_config=config).tokens == plain[:3]
        config = GenerationConfig(suppress_tokens=plain[:1], do_sample=False)
        assert plain[0] not in chat.fork().ask("w1 w2 w3", generation_config=config).tokens
        # What the configuration leaves open is the checkpoint's.
        model.generation_config.eos_token_id = [plain[2], 127]
        ended = sieve.chat(tokenizer).ask("w1 w2 w3", generation_config=GenerationConfig(do_sample=False))
        assert ended.tokens == plain[:3] and ended.ended
        for said, options in {
            r"generate\(num_beams=2\)": {"num_beams": 2},
            "^generation_config.num_beams=2": {"generation_config": GenerationConfig(num_beams=2)},
            "generation_config.max_length is not for a chat": {"generation_config": GenerationConfig(max_length=99)},
            "position_ids= is not for a chat": {"position_ids": torch.arange(9)[None]},
        }.items():
            with pytest.raises(UnsupportedOptionError, match=said):
                chat.ask("w4", **options)
        model.generation_config.num_beams = 3
        with pytest.raises(
            UnsupportedOptionError, match=r"model\.generation_config\.num_beams=3 gives several answers"
        ):
            sieve.chat(tokenizer)


@pytest.mark.parametrize("kind", ["num_beams", "do_sample"])
def test_one_answer_is_taken_of_a_prompt_on_the_command_line(model, kind):
    """Rows of several answers would be taken for those of other prompts."""
    prompt = EncodedPrompt(torch.arange(5, 12)[None], [])
    # Without sampling, which is what a command asks for, transformers refuses several sampled ones in its own words.
    model.generation_config.update(**{kind: 2 if kind == "num_beams" else True}, num_return_sequences=2)
    how = Generation(16, 4)
    with pytest.raises(UnsupportedOptionError, match=r"model\.generation_config\.num_return_sequences=2"):
        run_methods(model, chat_tokenizer(), prompt, [MethodRun("full", {}, FULL)], how)


@pytest.mark.parametrize("by", ["call", "model"])
def test_the_time_of_an_answer_includes_that_of_its_prompt(model, ids, by):
    given = []
    options = {"max_time": 1000.0} if by == "call" else {}
    if by == "model":
        model.generation_config.max_time = 1000.0
    with kvsieve.attach(model, FULL) as sieve:
        own = sieve.own_generate
        sieve.own_generate = lambda *args, **how: given.append(how["max_time"]) or own(*args, **how)
        sieve.generate(ids, chunk=8, **options, **GREEDY)
    assert 0 < given[0] < 1000.0


RULES = {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1}


@pytest.mark.parametrize("by", ["call", "model"])
@pytest.mark.parametrize("name", RULES)
def test_rules_about_the_prompt_see_all_of_it_where_a_shorter_one_is_read(model, ids, name, by):
    """No token of the prompt is said again, whether it was read again or not."""
    options = {**GREEDY, "eos_token_id": None}
    if by == "call":
        options[name] = RULES[name]
    else:
        setattr(model.generation_config, name, RULES[name])
    plan = kvsieve.plan("gemfilter", budget=8, layer=1, paper=True)
    with kvsieve.attach(model, plan) as sieve:
        found = sieve.generate(ids, **options)
        assert found.stats.deep_tokens < 30
        read = found.cache.conversation.short_prompt.token_index[0]
        made = found.sequences[0, 30:].tolist()
        if name == "repetition_penalty":
            rule = RepetitionPenaltyLogitsProcessor(RULES[name])
            short = torch.cat([ids[:, read], found.sequences[:, 30:33]], 1)
            with torch.no_grad():
                scores = rule(found.sequences[:, :33], own_logits(short))
            assert int(scores.argmax()) == made[3]
        else:
            assert not set(made) & set(ids[0].tolist())


# Likewise, of the prompt's last tokens and the answer's first.
SEQUENCES = {
    "bad_words_ids": lambda words: [words],
    "sequence_bias": lambda words: [[words, -100.0]],
}


@pytest.mark.parametrize("by", ["call", "model"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_rules_about_sequences_see_those_that_begin_where_nothing_is_read_again(model, ids, name, by):
    plan = kvsieve.plan("gemfilter", budget=3, layer=1, paper=True)
    with kvsieve.attach(model, plan) as sieve:
        found = sieve.generate(ids, **GREEDY)
        assert 28 not in found.cache.conversation.short_prompt.token_index[0].tolist()
        first = int(found.sequences[0, 30])
        rule = SEQUENCES[name]([*ids[0, -2:].tolist(), first])
        if by == "model":
            setattr(model.generation_config, name, rule)
        given = {name: rule} if by == "call" else {}
        assert int(sieve.generate(ids, **given, **GREEDY).sequences[0, 30]) != first


@pytest.mark.parametrize("by", ["call", "model"])
def test_a_stop_string_that_begins_where_nothing_is_read_again_ends_the_answer(by):
    model, tokenizer = fill(build("llama", dtype=torch.float64, vocab_size=256)), byte_level()
    ids = torch.tensor([tokenizer("Where is the needle? Nobody knows")["input_ids"]])
    halves = [number for letter, number in tokenizer.get_vocab().items() if not letter.isascii()]
    options = {**GREEDY, "suppress_tokens": halves}
    with kvsieve.attach(model, kvsieve.plan("gemfilter", budget=3, layer=1, paper=True)) as sieve:
        found = sieve.generate(ids, **options)
        assert ids.shape[1] - 2 not in found.cache.conversation.short_prompt.token_index[0].tolist()
        stop = tokenizer.decode(found.sequences[0, ids.shape[1] - 2 : ids.shape[1] + 2])
        if by == "model":
            model.generation_config.stop_strings = [stop]
        given = {"stop_strings": [stop]} if by == "call" else {}
        stopped = sieve.generate(ids, tokenizer=tokenizer, **given, **options).sequences
        assert stopped.shape[1] == ids.shape[1] + 2 < found.sequences.shape[1]


def own_logits(ids):
    """Logits behind ids, of the same model without a plan."""
    return fill(build("llama", dtype=torch.float64))(ids).logits[:, -1].float()


STEPS = {
    "gemfilter": kvsieve.plan("gemfilter", budget=8, layer=1, paper=True),
    "kvzip": kvsieve.plan("kvzip", budget=16, repeat_ids=(), go_on_ids=(), answer_ids=()),
    "finch": kvsieve.plan("finch", budget=16, question_tokens=4),
}
READ = {
    **{
        name: (plan, {}, f"'{name}' reads prompts in steps of its own: take another method")
        for name, plan in STEPS.items()
    },
    "chunk": (FULL, {"chunk": 8}, "chunk=8 is below its 30 tokens"),
    "question": (FULL, {"question_tokens": 5}, "question_tokens= has it read in two"),
}
STATES = {"output_hidden_states": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("by", ["call", "model"])
@pytest.mark.parametrize("name", READ)
def test_hidden_states_of_a_prompt_read_in_parts_are_refused_with_who_asks(model, ids, name, by):
    plan, reading, why = READ[name]
    options = {**GREEDY, **reading, **STATES}
    if by == "model":
        model.generation_config.output_hidden_states = options.pop("output_hidden_states")
    who = r"^generate\(out" if by == "call" else r"^model\.generation_config\.out"
    with kvsieve.attach(model, plan) as sieve:
        with pytest.raises(UnsupportedOptionError, match=rf"{who}put_hidden_states=.*, and {why}"):
            sieve.generate(ids, **options)
        # Without a dict nothing is returned of them.
        sieve.generate(ids, **{**options, "return_dict_in_generate": False})


@pytest.mark.parametrize("chunk", [None, 30])
def test_hidden_states_of_a_prompt_read_in_one_pass_are_transformers_own(model, ids, chunk):
    more = {**STATES, "output_logits": True, "output_scores": True}
    wanted = model.generate(ids, **GREEDY, **more)
    with kvsieve.attach(model, FULL) as sieve:
        found = sieve.generate(ids, chunk=chunk, **GREEDY, **more).output
        short = sieve.generate(ids, chunk=8, **GREEDY, output_logits=True, return_dict_in_generate=True).output
    for step, own in zip(found.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(step, own)
    torch.testing.assert_close(found.scores, wanted.scores)
    torch.testing.assert_close(short.logits, wanted.logits)


@pytest.mark.parametrize("by", ["call", "model"])
@pytest.mark.parametrize("name", STEPS)
def test_guidance_under_a_plan_that_reads_in_steps_is_refused_with_who_asks(model, ids, name, by):
    if by == "model":
        model.generation_config.guidance_scale = 2.0
    given = {"guidance_scale": 2.0} if by == "call" else {}
    who = r"^generate\(g" if by == "call" else r"^model\.generation_config\.g"
    with kvsieve.attach(model, STEPS[name]) as sieve:
        with pytest.raises(UnsupportedOptionError, match=rf"{who}uidance_scale=.*'{name}' reads prompts in steps"):
            sieve.generate(ids, **given, **GREEDY)
        sieve.generate(ids, **GREEDY, guidance_scale=1)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 3),
        ({"draft": "none"}, None),
        ({"draft": False}, None),
        ({"prompt_lookup_num_tokens": None}, None),
        ({"draft": "lookup:tokens=5"}, 5),
        ({"prompt_lookup_num_tokens": 5}, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["generate", "chat"])
def test_a_call_overrides_the_drafts_of_a_configuration(monkeypatch, given, tokens, by):
    model = build("llama")
    model.generation_config.prompt_lookup_num_tokens = 3
    opened = []
    monkeypatch.setattr(drafted, "open_drafts", lambda draft, *_: opened.append(draft.tokens) or [])
    monkeypatch.setattr(drafted.TokenSteps, "ended", True)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        if by == "generate":
            sieve.generate(tiny_prompt(), max_new_tokens=2, **given)
        else:
            sieve.chat(chat_tokenizer(), max_new_tokens=2).ask("w1 w2", **given)
    assert opened == [] if tokens is None else [tokens]


@pytest.mark.parametrize("by", ["run", "bench"])
def test_commands_without_a_draft_draft_nothing(model, ids, monkeypatch, by):
    model.generation_config.prompt_lookup_num_tokens = 3
    monkeypatch.setattr(drafted, "open_drafts", lambda *_: pytest.fail("drafts"))
    if by == "run":
        run_methods(model, chat_tokenizer(), EncodedPrompt(ids, []), [MethodRun("full", {}, FULL)], Generation(16, 4))
    else:
        KvsieveMethod(model, FULL, "full").run(TokensPrompt(ids), 4)

"""What a checkpoint's generation_config says is obeyed by a server, or refused by name at its start."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import kvsieve
from kvsieve.decoding.asked import Sampling
from kvsieve.decoding.sampling import processors_for
from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.attach import attached
from kvsieve.hf.generate.config import FROM_HUB, REFUSED
from kvsieve.planning.plans import Plan
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prepare import Preparer, check_generation_config
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.schema import CompletionRequest
from kvsieve.serve.ticket import Summary
from orders import Heard, prompt
from tiny import tiny_model
from toy_words import word_tokenizer

IDS, CHUNK = prompt(5, 30), 24
# By attribute, a value that changes the answer, given the plain answer's tokens.
OBEYED = {
    "suppress_tokens": lambda said: said[:2],
    "begin_suppress_tokens": lambda said: said[:1],
    "bad_words_ids": lambda said: [said[:1], said[1:3]],
    "no_repeat_ngram_size": lambda said: 1,
    "repetition_penalty": lambda said: 1.5,
    "encoder_repetition_penalty": lambda said: 0.5,
    "encoder_no_repeat_ngram_size": lambda said: 1,
    "sequence_bias": lambda said: [[[said[0]], -5.0]],
    "forced_eos_token_id": lambda said: 9,
    "min_new_tokens": lambda said: 6,
    "min_length": lambda said: 36,
    "eos_token_id": lambda said: [said[3], said[5]],
    "exponential_decay_length_penalty": lambda said: (0, 3.0),
    "max_new_tokens": lambda said: 3,
}
# Those that change nothing here: of sampling, which a request asks for, and without an effect on finite numbers.
ALSO_OBEYED = {
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "do_sample"),
    *("renormalize_logits", "remove_invalid_values", "watermarking_config", "stop_strings", "forced_bos_token_id"),
}
STOPS_AT_START = {*REFUSED, *(name for names in FROM_HUB.values() for name in names), "use_cache"} | {
    *("num_beams", "guidance_scale", "max_time")
}
# Of ways of decoding that are refused, of what generate returns, of caches and compiling that it brings itself, and
# those that a request decides: how many answers, how long the whole is.
WITHOUT_EFFECT = {
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "num_assistant_tokens", "is_assistant"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "max_matching_ngram_size", "speculation_type", "output_hidden_states"),
    *("output_scores", "output_logits", "return_dict_in_generate", "cache_config", "max_cache_len", "compile_config"),
    *("disable_compile", "continuous_batching_config", "num_return_sequences", "max_length"),
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config"),
    *("trust_remote_code", "generation_kwargs", "_commit_hash"),
}


@pytest.fixture(scope="module")
def shared():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def model(shared):
    """With a configuration of its own, without end tokens."""
    kept, shared.generation_config = shared.generation_config, GenerationConfig(pad_token_id=0)
    yield shared
    shared.generation_config = kept


def preparer(model) -> Preparer:
    plans = AllowedPlans(Plan(), "full", None, (), False, lambda plan: plan)
    return Preparer(model, word_tokenizer(), plans, ServerLimits(max_tokens=8))


def served(model, **body) -> list[int]:
    """Tokens of a server's answer."""
    request = CompletionRequest(model="tiny", prompt=list(IDS), logprobs=0, **body)
    (order,) = preparer(model).completion(request, "")
    heard = Heard()
    with attached(model, Plan(), "eager", any_plan=True) as sieve:
        scheduler = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK))
        scheduler.start()
        scheduler.submit(order, heard.events.put)
        events = heard.all()
        scheduler.close()
    assert isinstance(events[-1], Summary), events[-1]
    return [token.own.id for event in events[:-1] for token in event.tokens]


def generated(model, **options) -> list[int]:
    """Tokens of the library's answer, without the one that ended it."""
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    with kvsieve.attach(model, Plan()) as sieve:
        made = sieve.generate(torch.tensor([IDS]), chunk=CHUNK, **options).sequences[0, len(IDS) :].tolist()
    ends = model.generation_config.eos_token_id or []
    return made[:-1] if made[-1] in ends else made


def processors(model, rules) -> list[str]:
    return [type(each).__name__ for each in processors_for(model, torch.tensor(IDS), rules, 8, ())]


def test_every_attribute_of_a_configuration_is_known():
    listed = [{*OBEYED}, ALSO_OBEYED, STOPS_AT_START, WITHOUT_EFFECT]
    assert vars(GenerationConfig()).keys() <= set.union(*listed)
    assert sum(map(len, listed)) == len(set.union(*listed))


@pytest.mark.parametrize("name", OBEYED)
def test_an_answer_obeys_what_the_checkpoint_says(model, name):
    plain = generated(model)
    if "length" in name or name == "min_new_tokens":
        model.generation_config.eos_token_id = [plain[6 if "decay" in name else 2]]
        plain = generated(model)
    setattr(model.generation_config, name, OBEYED[name](generated(model)))
    ends = [127] if model.generation_config.eos_token_id is None else model.generation_config.eos_token_id
    options = {"max_new_tokens": 3} if name == "max_new_tokens" else {}
    wanted = generated(model, eos_token_id=[*ends, 127], **options)
    assert served(model) == wanted != plain


def test_what_a_request_says_goes_before_it(model):
    model.generation_config.repetition_penalty, model.generation_config.max_new_tokens = 5.0, 2
    assert served(model, repetition_penalty=1.0, max_tokens=8) == generated(model, repetition_penalty=1.0)
    model.generation_config.min_p = 0.3
    model.generation_config.update(top_k=7, top_p=0.4)
    cold = Sampling(temperature=0.5, top_k=0, min_p=0.0)
    assert processors(model, cold) == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopPLogitsWarper",
    ]
    warped = ["TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"]
    assert processors(model, Sampling(temperature=0.5))[2:] == warped
    # Nothing of sampling where none is asked for, and transformers' own defaults are no wish of anybody.
    assert len(processors(model, Sampling())) == 1
    model.generation_config = GenerationConfig()
    assert processors(model, cold) == ["TemperatureLogitsWarper"]


def test_ignoring_the_end_ignores_what_is_said_of_it(model):
    ends = generated(model)[2]
    model.generation_config.update(eos_token_id=[ends], exponential_decay_length_penalty=(0, 3.0), min_new_tokens=6)
    model.generation_config.pad_token_id = 0
    plain = generated(model, eos_token_id=None, exponential_decay_length_penalty=None, min_new_tokens=None)
    assert served(model, ignore_eos=True) == plain and ends in plain


def test_a_text_of_the_checkpoint_ends_an_answer(model):
    said = generated(model)
    model.generation_config.stop_strings = word_tokenizer().decode(said[3:4])
    (order,) = preparer(model).completion(CompletionRequest(model="tiny", prompt=list(IDS), stop="w1"), "")
    assert order.stops == ("w1", model.generation_config.stop_strings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 3),
        ("guidance_scale", 1.5),
        ("max_time", 2.0),
        ("penalty_alpha", 0.6),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("token_healing", True),
        ("prompt_lookup_num_tokens", 3),
    ],
)
def test_what_a_server_cannot_follow_is_refused_at_its_start(model, name, value):
    model.generation_config.update(**{name: value}, top_k=4)
    with pytest.raises(UnsupportedOptionError, match=f"model.generation_config.{name}=.* take it out of generation_co"):
        preparer(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 1), ("guidance_scale", 1.0), ("use_cache", True), ("cache_implementation", "dynamic")],
)
def test_what_asks_for_nothing_is_taken(model, name, value):
    setattr(model.generation_config, name, value)
    check_generation_config(model)

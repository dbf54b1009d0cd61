"""Plans with a codec: what holds of other plans holds of encoded entries, in turns, copies and files."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.cache import PackedStore
from kvsieve.cli.specs import compared_specs, make_runs, parse_codecs, parse_rests
from kvsieve.errors import CacheFileError, PlanError, UnsupportedModelError
from kvsieve.hf.forward.session import Session
from kvsieve.lab.bench.estimate import estimate
from kvsieve.lab.bench.geometry import geometry
from kvsieve.lab.eval.cells import settings
from kvsieve.methods import HQQ, KIVI, Rotated, SnapKV
from kvsieve.planning.named import crossed
from kvsieve.planning.plans import Plan
from small import plan_of, recorder_stand_in, stored
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build
from toy_words import word_tokenizer

CODEC = KIVI(bits=8, block=16, tail=16)
# Exact entries of a KV head: newest ones, those of an unfilled block, and room for as many as a block.
EXACT = CODEC.tail + 2 * CODEC.block
GREEDY = greedy(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)


def writes(info):
    """Whether a method writes entries, which codecs do not encode."""
    evict = info.make(**info.example).evict
    return evict is not None and evict.traits.writes


METHODS = [
    name
    for name in kvsieve.list_methods()
    # Scores of entries are not encoded.
    if name != "infllm" and not (kvsieve.method_info(name).is_codec or writes(kvsieve.method_info(name)))
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def double():
    return tiny_model()


@pytest.fixture(scope="module")
def talk():
    """A padded batch of prompts, their mask, and what is said after the answer."""
    made = torch.Generator().manual_seed(11)
    ids = torch.randint(2, 120, (2, 90), generator=made)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask, torch.randint(2, 120, (2, 40), generator=made)


def snapkv(codec=CODEC, **given):
    return kvsieve.plan("snapkv", codec=codec, paper=True, **{"budget": 60, "window": 4, **given})


def goes_on(sieve, result, talk, cache=None, **options):
    ids, mask, more = talk
    whole = torch.cat([result.sequences, more[: len(result.sequences)]], 1)
    ones = torch.ones(len(whole), whole.shape[1] - mask.shape[1], dtype=mask.dtype)
    mask = torch.cat([mask[: len(whole)], ones], 1)
    return sieve.generate(whole, mask, cache=result.cache if cache is None else cache, **{**GREEDY, **options})


def logits(result):
    return torch.stack(result.output.logits, 1)


def stores(cache):
    return [layer.store for layer in cache.sieve_layers.values()]


def encoded(cache):
    """Entries that are encoded, of the KV head with the most, in each layer."""
    return [sum(body.width for body in each.bodies) if isinstance(each, PackedStore) else 0 for each in stores(cache)]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_over_encoded_entries(model, talk, name):
    ids = talk[0][:1]
    plan = plan_of(name, model)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    said = None
    for codec in (None, CODEC):
        with kvsieve.attach(model, dataclasses.replace(plan, codec=codec)) as sieve:
            first = sieve.generate(ids, **{**GREEDY, "max_new_tokens": 2})
            assert first.stats.applied or name == "full"
            held = encoded(first.cache)
            # The same tokens for both.
            said = first.sequences if said is None else said
            whole = torch.cat([said, talk[2][:1]], 1)
            second = sieve.generate(whole, cache=first.cache, **{**GREEDY, "max_new_tokens": 2})
        found.append((logits(first), logits(second)))
    # A method that silently did not run is the worst bug.
    assert held != [0] * len(held) and sum(held) >= CODEC.block
    # Errors of the second prompt's attention may let another token travel, and of keys, another of two equal ones stay.
    most = 0.01 if plan.propagate is None and name != "triattention" else 0.05
    for exact, ours in zip(*found, strict=True):
        assert (exact[:, 0].softmax(-1) - ours[:, 0].softmax(-1)).abs().max() < most
    assert not torch.equal(*(second for _, second in found))


def test_what_does_not_fill_a_block_is_as_without_a_codec(model, talk):
    results = []
    for codec in (None, KIVI(bits=2, block=256)):
        with kvsieve.attach(model, snapkv(codec)) as sieve:
            results.append(sieve.generate(*talk[:2], **GREEDY))
    assert torch.equal(logits(results[0]), logits(results[1]))
    assert results[0].stats.applied and not results[1].stats.applied
    assert "nothing was encoded" in str(results[1].stats) and "nothing encoded yet" in results[1].stats.codec


def test_a_padded_row_equals_the_row_alone(double, talk):
    ids, mask, _ = talk
    with kvsieve.attach(double, snapkv(budget=40)) as sieve:
        both, alone = sieve.generate(ids, mask, **GREEDY), sieve.generate(ids[1:, 7:], **GREEDY)
        assert encoded(both.cache) == encoded(alone.cache) == [38] * 4
        assert (logits(both)[1] - logits(alone)[0]).abs().max() < 1e-5
        more = goes_on(sieve, both, talk)
        whole = torch.cat([alone.sequences, talk[2][1:]], 1)
        again = sieve.generate(whole, cache=alone.cache, **GREEDY)
        assert (logits(more)[1] - logits(again)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("codec", [KIVI(bits=4, block=16, tail=8), HQQ(bits=4, block=16, tail=8)], ids=["kivi", "hqq"])
def test_a_padded_row_in_chunks_equals_the_row_alone(double, talk, codec):
    """Chunks attend to what chunks before have encoded, so that padding must not move their borders."""
    ids, mask, _ = talk
    with kvsieve.attach(double, Plan(codec=codec)) as sieve:
        both, alone = sieve.generate(ids, mask, chunk=25, **GREEDY), sieve.generate(ids[1:, 7:], chunk=25, **GREEDY)
        assert encoded(alone.cache) == [80] * 4
        # Other rows have blocks of other sizes, which makes no difference to what a row's say.
        assert (logits(both)[1] - logits(alone)[0]).abs().max() < 1e-5
        more = goes_on(sieve, both, talk)
        again = sieve.generate(torch.cat([alone.sequences, talk[2][1:]], 1), cache=alone.cache, **GREEDY)
        assert (logits(more)[1] - logits(again)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["h2o", "snapkv", "adakv"])
def test_what_a_method_remembers_goes_with_entries_that_encoding_moves(double, name):
    """Rows of different length encode different numbers of entries, which moves the slots of the shorter one."""
    made, pad = torch.Generator().manual_seed(11), 23
    ids, more = (torch.randint(2, 120, (2, size), generator=made) for size in (60, 12))
    mask = torch.ones_like(ids)
    ids[1, :pad], mask[1, :pad] = 0, 0
    options = {**GREEDY, "max_new_tokens": 8}
    plan = dataclasses.replace(plan_of(name, double), codec=KIVI(bits=8, block=8, tail=8))
    with kvsieve.attach(double, plan) as sieve:
        both, alone = sieve.generate(ids, mask, **options), sieve.generate(ids[1:, pad:], **options)
        for turn in range(2):
            assert torch.equal(both.sequences[1, pad:], alone.sequences[0])
            assert stored(both.cache, (0, pad))[1] == stored(alone.cache)[0]
            assert min(encoded(alone.cache)) >= 4
            if not turn:
                both = goes_on(sieve, both, (ids, mask, more), max_new_tokens=4)
                one = ids[1:, pad:], mask[1:, pad:], more[1:]
                alone = goes_on(sieve, alone, one, max_new_tokens=4)


def test_chunks_equal_one_shot_where_an_evictor_acts_at_the_end(double, talk):
    with kvsieve.attach(double, snapkv(budget=50)) as sieve:
        whole, parts = (sieve.generate(*talk[:2], chunk=chunk, **GREEDY) for chunk in (None, 16))
    assert encoded(whole.cache) == encoded(parts.cache) == [48] * 4
    assert (logits(whole) - logits(parts)).abs().max() < 1e-9


def test_copies_go_on_alike(model, talk):
    with kvsieve.attach(model, snapkv()) as sieve:
        first = sieve.generate(*talk[:2], **GREEDY)
        fork, snapshot = first.cache.fork(), first.cache.snapshot()
        answers = [goes_on(sieve, first, talk)]
        assert first.cache.num_seen > fork.num_seen and min(encoded(fork)) > 0
        answers.append(goes_on(sieve, first, talk, cache=fork))
        first.cache.rollback(snapshot)
        # Beams reorder rows and blocks, and end before the other answers begin.
        goes_on(sieve, first, talk, num_beams=2, max_new_tokens=6)
        first.cache.rollback(snapshot)
        answers.append(goes_on(sieve, first, talk))
    assert all(torch.equal(logits(answers[0]), logits(each)) for each in answers[1:])


def test_beams_of_encoded_entries_are_those_of_full_kv(double, talk):
    found = []
    for codec in (None, CODEC):
        with kvsieve.attach(double, snapkv(codec)) as sieve:
            options = {"num_beams": 3, "max_new_tokens": 10}
            found.append(sieve.generate(talk[0][:1], **{**GREEDY, **options}))
    assert torch.equal(found[0].sequences, found[1].sequences) and min(encoded(found[1].cache)) >= 32


def test_a_saved_cache_keeps_the_encoded_form(model, talk, tmp_path):
    path = tmp_path / "talk"
    with kvsieve.attach(model, snapkv()) as sieve:
        first = sieve.generate(*talk[:2], **GREEDY)
        sieve.save(first.cache, path, ids=first.sequences)
        second, loaded = goes_on(sieve, first, talk), sieve.load(path)
        assert min(encoded(loaded.cache)) > 0
        again = goes_on(sieve, first, talk, cache=loaded.cache)
    assert torch.equal(logits(second), logits(again)) and encoded(first.cache) == encoded(loaded.cache)
    with (
        kvsieve.attach(model, snapkv(KIVI(bits=4, block=16, tail=16))) as other,
        pytest.raises(CacheFileError, match="codec.bits is 8 in the file and 4 here"),
    ):
        other.load(path)


def test_a_chat_goes_on_from_its_file(model, tmp_path):
    tokenizer = word_tokenizer(
        "{% for message in messages %}{{ '[BOS] ' + message['content'] + ' [EOS] ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[BOS] ' }}{% endif %}"
    )
    document = " ".join(f"w{3 + number % 100}" for number in range(80))
    with kvsieve.attach(model, snapkv()) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=8)
        chat.ask(document)
        chat.save(tmp_path / "chat")
        answers = [chat.ask("w9 w8"), sieve.chat(tokenizer, load=tmp_path / "chat", max_new_tokens=8).ask("w9 w8")]
    assert answers[0].text == answers[1].text and answers[0].stats.codec == answers[1].stats.codec
    assert answers[0].stats.codec.startswith("KIVI at ")


def test_no_more_than_one_layer_is_exact_at_a_time_and_no_decoded_copy_survives(model, talk, monkeypatch):
    live = []
    attend = Session.attend

    def counting(session, index, layer, *given):
        out = attend(session, index, layer, *given)
        held = [each for each in stores(session.cache) if not each.is_empty]
        live.append(sum(not isinstance(each, PackedStore) for each in held))
        return out

    monkeypatch.setattr(Session, "attend", counting)
    with kvsieve.attach(model, Plan(codec=CODEC)) as sieve:
        cache = sieve.generate(*talk[:2], **GREEDY).cache
    assert len(live) == 4 * GREEDY["max_new_tokens"] and set(live) == {0}
    wide = [part.shape for each in stores(cache) for part in each.all_tensors() if part.is_floating_point()]
    # Scales of blocks come with one for each channel, of 16 in a head, and are of single tokens.
    assert not [shape for shape in wide if len(shape) == 4 and shape[2] > EXACT]
    assert cache.nbytes() < 0.6 * sum(each.heads * 2 * 92 * (2 * 16 * 4 + 4) for each in stores(cache))


def test_recorded_and_fused_passes(model, talk):
    answers = {}
    with recorder_stand_in():
        for decode in ("eager", "graph"):
            with kvsieve.attach(model, snapkv(), decode=decode) as sieve:
                answers[decode] = sieve.generate(*talk[:2], **GREEDY)
    assert answers["graph"].stats.decoding.engine == "graph"
    torch.testing.assert_close(logits(answers["eager"]), logits(answers["graph"]), atol=1e-3, rtol=0)
    # Also where another plan goes on with the cache, as evaluation does once the prompt is complete.
    ids = talk[0][:1]
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4, rest=CODEC, paper=True)) as sieve:
        kept = sieve.generate(ids, **GREEDY)
    whole = torch.cat([kept.sequences, talk[2][:1]], 1)
    for decode in ("eager", "graph"):
        with recorder_stand_in(), kvsieve.attach(model, Plan(), decode=decode) as sieve:
            answers[decode] = sieve.generate(whole, cache=sieve.adopt(kept.cache.fork()), **GREEDY)
    assert answers["graph"].stats.decoding.engine == "graph" and min(encoded(answers["graph"].cache)) > 0
    torch.testing.assert_close(logits(answers["eager"]), logits(answers["graph"]), atol=1e-3, rtol=0)
    small = build("llama", dtype=torch.bfloat16)
    for decode in ("eager", "fused"):
        with kvsieve.attach(small, snapkv(), decode=decode) as sieve:
            answers[decode] = sieve.generate(*talk[:2], **GREEDY)
    assert (logits(answers["eager"]) - logits(answers["fused"])).abs().max() < 0.1


@pytest.mark.parametrize(
    "method, stored",
    [
        ("full", {"codec": KIVI(block=16, tail=32)}),
        ("snapkv", {"codec": KIVI(block=16, tail=32)}),
        ("snapkv", {"rest": Rotated(bits=2, block=16)}),
        ("snapkv", {"rest": KIVI(bits=2, block=16), "codec": KIVI(bits=8, block=16)}),
    ],
)
def test_estimates_are_what_is_held(model, method, stored):
    given = {} if method == "full" else {"budget": 150, "window": 4}
    plan = kvsieve.plan(method, **stored, **given)
    ids = tiny_prompt(2, 400, seed=3)
    with kvsieve.attach(model, plan) as sieve:
        stats = sieve.generate(ids, **{**GREEDY, "max_new_tokens": 1}).stats
    told = estimate(geometry(model.config), plan, 400, batch=2, element_bytes=4)
    assert told.kv_bytes == pytest.approx(stats.storage.bytes, rel=0.02)
    assert told.decode_bytes - told.weight_bytes < estimate(geometry(model.config), Plan(), 400, batch=2).kv_bytes


def test_a_budget_in_bytes_counts_encoded_entries(model, talk):
    found = {}
    ids = tiny_prompt(1, 500, seed=3)
    for codec in (None, CODEC):
        with kvsieve.attach(model, snapkv(codec, budget="64KiB")) as sieve:
            cache = sieve.prefill(ids)
        assert 0.7 * 2**16 < cache.nbytes() <= 2**16
        found[codec] = cache.entries()[0]
    assert found[CODEC] > 1.5 * found[None]


def test_traffic_and_statistics_are_of_encoded_entries(model, talk):
    read = {}
    for codec in (None, KIVI(bits=4, block=16, tail=16)):
        with kvsieve.attach(model, Plan(codec=codec)) as sieve:
            stats = sieve.generate(*talk[:2], **GREEDY).stats
        read[codec] = stats.traffic.bytes
    assert read[codec] < 0.5 * read[None]
    # Codes, a scale and a zero per 16 tokens of a channel, or per 16 channels of a token.
    assert stats.codec == "KIVI at 6.00 bits a number" and stats.codec in str(stats) and stats.applied


def test_what_cannot_be_encoded_is_refused(model):
    with pytest.raises(PlanError, match="stores entries for each query head.*leave per_query_head out"):
        Plan(evict=SnapKV(budget=40, per_query_head=True), codec=CODEC)
    with (
        pytest.raises(UnsupportedModelError, match="have 16 channels, which groups of 12 do not divide"),
        kvsieve.attach(model, Plan(codec=KIVI(group=12))),
    ):
        pass
    with (
        pytest.raises(UnsupportedModelError, match="latent attention.*KIVI encodes.*without codec="),
        kvsieve.attach(build("deepseek_v3"), Plan(codec=CODEC)),
    ):
        pass


def test_layers_that_share_kv_attend_to_what_their_source_attended_to():
    """Gemma 3n's last layers read an earlier one's entries, which are encoded before they come to it."""
    model = build("gemma3n_text", dtype=torch.float64)
    ids = tiny_prompt(1, 70, seed=2)
    found = []
    for codec in (None, CODEC):
        with kvsieve.attach(model, Plan(codec=codec)) as sieve:
            found.append(sieve.generate(ids, **GREEDY))
    assert max(encoded(found[1].cache)) >= 48
    assert torch.allclose(logits(found[0])[:, 0], logits(found[1])[:, 0], atol=1e-9)
    assert (logits(found[0]) - logits(found[1])).abs().max() < 0.2


def test_plans_with_a_codec_come_back_from_json():
    plan = kvsieve.plan("snapkv", budget="10%", codec="kivi:bits=2:sinks=4")
    assert plan.codec == KIVI(bits=2, sinks=4) and Plan.from_dict(plan.to_dict()) == plan


def test_codecs_of_the_command_line_are_crossed_with_methods():
    codecs = parse_codecs("none,kivi:bits=2")
    runs = make_runs(compared_specs("full,snapkv:window=8,kivi:bits=8", None), codecs)
    labels = ["full", "full codec=kivi:bits=2", "snapkv:window=8", "snapkv:window=8 codec=kivi:bits=2", "kivi:bits=8"]
    assert [run.label for run in runs] == labels
    assert runs[3].plan.codec == KIVI(bits=2) and runs[3].parameters["codec"] == "kivi:bits=2"
    for text, match in (
        ("none,none", "twice"),
        ("", "no codec"),
        ("snapkv", "no codec; codecs are"),
        ("kivi:b=1", "b"),
    ):
        with pytest.raises(PlanError, match=match):
            parse_codecs(text)
    made = settings(crossed([("snapkv", {}), ("full", {}), ("kivi", {})], codecs, [None]), ["5%", "10%"])
    assert [(each.label, each.budget) for each in made] == [
        ("full", None),
        ("snapkv", "5%"),
        ("snapkv codec=kivi:bits=2", "5%"),
        ("full codec=kivi:bits=2", None),
        ("kivi", None),
        ("snapkv", "10%"),
        ("snapkv codec=kivi:bits=2", "10%"),
    ]


def test_what_methods_would_drop_is_asked_for_on_the_command_line():
    runs = make_runs(compared_specs("full,snapkv:window=8,quest,mixed", None), [None, "int8"], parse_rests("none,2bit"))
    assert [run.label for run in runs] == [
        "full",
        "full codec=int8",
        "snapkv:window=8",
        "snapkv:window=8 rest=2bit",
        "snapkv:window=8 codec=int8",
        "snapkv:window=8 codec=int8 rest=2bit",
        "quest",
        "quest codec=int8",
        "mixed",
        "mixed codec=int8",
    ]
    assert runs[3].plan.rest == Rotated(bits=2) and runs[3].parameters["rest"] == "2bit"
    with pytest.raises(PlanError, match="none of the methods named has such a rest"):
        make_runs(compared_specs("full,quest", None), [None], parse_rests("2bit"))
    for text, match in (("2bit,2bit", "twice"), ("", "--rest names no codec"), ("snapkv", "no codec; codecs are")):
        with pytest.raises(PlanError, match=match):
            parse_rests(text)

"""Options that every plan has: protect=, quotas=, skip_layers=, question_tokens= and reduce=."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, PlanError
from kvsieve.methods import H2O, TSP, AdaptiveTSP, KNorm, LagKV, SnapKV, StreamingLLM
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Evictor, Propagator
from kvsieve.planning.segments import role_spans
from kvsieve.types import Quotas, Selection
from layers import context, golden, kept
from small import plan_of, stored
from tiny import greedy, padded_prompt, tiny_prompt
from toy_words import word_tokenizer

GREEDY = greedy()
LENGTH, PADDING = 200, 11
SPANS = [(0, 3), (57, 69), (130, 131)]
QUOTAS = [((5, 35), 14), ((90, 110), "50%")]


def drops(name):
    """Tell whether a method drops anything; readers, views, codecs and sparse prompts keep all, and so does `rest`."""
    info = kvsieve.method_info(name)
    plan = info.make(**info.example)
    return bool(set(plan.roles) - {"read", "codec", "prefill"}) and plan.rest is None and not plan.is_view


METHODS = [name for name in kvsieve.list_methods() if drops(name)]
SPARSE_PROMPTS = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_prefill]


@pytest.fixture(scope="module")
def batch():
    return padded_prompt(LENGTH, PADDING, seed=8)


def every_head(cache, padding=(0,)):
    for row in stored(cache, padding):
        for layer in row:
            yield from map(set, layer)


def tokens(*spans):
    return {token for start, end in spans for token in range(start, end)}


def is_held(cache, padding=(0,), spans=SPANS, quotas=QUOTAS):
    for held in every_head(cache, padding):
        assert tokens(*spans) <= held
        for span, count in quotas:
            assert len(tokens(span) & held) >= Budget.parse(count).entries(span[1] - span[0])
    return True


@pytest.mark.parametrize("name", METHODS)
def test_nothing_that_is_held_is_dropped(model, batch, name):
    """In padded batches as alone, in chunks, while decoding and at a later turn."""
    ids, mask = batch
    plan = plan_of(name, model)
    takes = plan.evict is None or plan.evict.traits.takes_quotas
    quotas = QUOTAS if takes else []
    held = {"protect": SPANS, "quotas": quotas}
    pads = (0, PADDING)
    with kvsieve.attach(model, plan) as sieve:
        if not takes:
            with pytest.raises(InputError, match="quotas= needs an evictor that ranks"):
                sieve.prefill(ids, mask, quotas=QUOTAS)
        result = sieve.generate(ids, mask, max_new_tokens=4, chunk=64, **held, **GREEDY)
        cache = result.cache
        assert is_held(cache, pads, quotas=quotas)
        assert result.stats.applied
        alone = sieve.generate(ids[1:, PADDING:], max_new_tokens=4, **held, **GREEDY)
        assert torch.equal(alone.sequences[0], result.sequences[1, PADDING:])
        assert stored(alone.cache)[0] == stored(cache, pads)[1]
        free = sieve.prefill(ids[1:, PADDING:])
        assert not all(tokens(*SPANS) <= head for head in every_head(free)), "the spans decide nothing"
        more = tiny_prompt(2, 30, seed=9)
        talk = torch.cat([result.sequences, more], 1)
        talk_mask = torch.cat([mask, torch.ones(2, 34, dtype=mask.dtype)], 1)
        later = [[(LENGTH + 10, LENGTH + 14)], [(LENGTH - PADDING + 10, LENGTH - PADDING + 14)]]
        second = sieve.generate(talk, talk_mask, cache=cache, max_new_tokens=2, protect=later, **GREEDY)
        assert is_held(second.cache, pads, quotas=quotas)
        for row, spans in zip(stored(second.cache, pads), later, strict=True):
            assert all(tokens(*spans) <= set(head) for layer in row for head in layer)


DECODING = {
    "tova": {},
    "h2o": {"recent": 1.0},
    "streamingllm": {"every": 3},
    "knorm": {"every": 1},
    "snapkv": {"every": 2, "per_query_head": True},
    "lagkv": {},
}


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 3}, {"num_beams": 2, "chunk": 64}], ids=["greedy", "beams", "beams in chunks"]
)
def test_nothing_that_is_held_is_dropped_while_decoding(model, batch, name, mode):
    ids, mask = batch
    plan = plan_of(name, model, **DECODING[name])
    quotas = QUOTAS if name != "lagkv" else []
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, mask, max_new_tokens=16, protect=SPANS, quotas=quotas, **mode, **GREEDY)
    rows = [pad for pad in (0, PADDING) for _ in range(mode.get("num_beams", 1))]
    assert is_held(result.cache, rows, quotas=quotas)
    assert max(result.cache.entries()) <= (80 + 2 if name != "lagkv" else 110)


def with_marks(ctx, protected=(), segments=(), counts=()):
    """The context with these slots protected, and parts of slots with quotas, the same in all heads and rows."""
    shape = ctx.keys.shape[:3]
    mask, segment = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int32)
    mask[..., list(protected)] = True
    for part, slots in enumerate(segments, 1):
        segment[..., list(slots)] = part
    if ctx.valid is not None:
        mask, segment = mask & ctx.valid, segment * ctx.valid
    quotas = Quotas(segment, torch.tensor([counts] * shape[0])) if counts else None
    return replace(ctx, protected=mask if protected else None, quotas=quotas, state={})


def test_knorm_by_hand():
    # Norms 5, 1, 3, 1, 2, 4: the smallest first are slots 1, 3, 4, 2, 5, 0.
    keys = torch.tensor([5.0, 1.0, 3.0, 1.0, 2.0, 4.0])[None, None, :, None]
    ctx = context(torch.zeros_like(keys), keys)
    assert kept(KNorm(budget=3), with_marks(ctx, [0])) == [[0, 1, 3]]
    assert kept(KNorm(budget=2), with_marks(ctx, [0, 5])) == [[0, 5]]
    assert kept(KNorm(budget=3), with_marks(ctx, segments=[[0, 2, 5]], counts=[2])) == [[1, 2, 5]]
    # What is protected counts for its part.
    assert kept(KNorm(budget=3), with_marks(ctx, [5], [[0, 2, 5]], [2])) == [[1, 2, 5]]
    assert kept(KNorm(budget=3), with_marks(ctx, [4], [[0, 2], [1, 3, 5]], [1, 1])) == [[1, 2, 4]]


def test_what_the_caller_protects_comes_before_what_the_method_does():
    ctx = context(torch.zeros(1, 1, 10, 2), torch.zeros(1, 1, 10, 2))
    assert kept(StreamingLLM(budget=3, sinks=2), with_marks(ctx, [5, 6])) == [[0, 5, 6]]
    assert kept(StreamingLLM(budget=5, sinks=2), with_marks(ctx, [5, 6])) == [[0, 1, 5, 6, 9]]


def test_h2o_by_hand():
    # Uniform attention: earlier slots have more mass. Of 5, slot 4 is protected; half of the other 4 are recent.
    keys = torch.zeros(1, 1, 10, 2)
    ctx = context(torch.zeros(1, 1, 10, 2), keys)
    assert kept(H2O(budget=5), with_marks(ctx, [4])) == [[0, 1, 4, 8, 9]]
    assert kept(H2O(budget=5, recent=1.0), with_marks(ctx, [0, 1])) == [[0, 1, 7, 8, 9]]


def test_lagkv_by_hand():
    # 2 sinks and 5 partitions of 4, the last of which stays; 22 - 2 - 4 are judged.
    keys = golden((1, 1, 22, 4), 5)
    ctx = context(torch.zeros(1, 1, 1, 4), keys, values=golden((1, 1, 22, 4), 6))
    evictor = LagKV(budget=14, sinks=2, lag=4)
    free = kept(evictor, ctx)[0]
    assert len(free) == 14 and [sum(2 + 4 * p <= j < 6 + 4 * p for j in free) for p in range(4)] == [2, 2, 2, 2]
    # Four protected in one partition leave four to the other three: one each, and two of the newest.
    ctx = with_marks(ctx, [6, 7, 8, 9])
    held = kept(evictor, ctx)[0]
    assert {6, 7, 8, 9} <= set(held) and len(held) == 14
    assert [sum(2 + 4 * p <= j < 6 + 4 * p for j in held) for p in range(4)] == [1, 4, 1, 2]
    assert ctx.state["judged"].tolist() == [[1, 4, 1, 2]]


@pytest.mark.parametrize("groups", [1, 3], ids=lambda g: f"G{g}")
def test_ranking_equals_the_slow_reference_in_padded_batches(groups):
    torch.manual_seed(groups)
    length, padding, budget, window = 61, [0, 9], 30, 5
    query = torch.randn(2, 2 * groups, length, 8, dtype=torch.float64)
    keys = torch.randn(2, 2, length, 8, dtype=torch.float64)
    evictor = SnapKV(budget=budget, window=window, kernel=3)
    free = context(query, keys, padding=padding)
    protected, parts, counts = [3, 12, 40, 41], [range(10, 25), range(30, 50)], [6, 9]
    ctx = with_marks(free, protected, parts, counts)
    scores = evictor.scores(free)
    for row, pad in enumerate(padding):
        for head, ours in enumerate(kept(evictor, ctx, row)):
            own = scores[row, head].tolist()
            slots = sorted(range(pad, length), key=lambda j: (-own[j], j))
            must = {j for j in protected if j >= pad}
            for part, count in zip(parts, counts, strict=True):
                best = [j for j in sorted(slots, key=lambda j: j not in must) if j in part]
                must |= set(best[:count])
            rest = [j for j in slots if j not in must]
            assert ours == sorted([*must, *rest[: budget - len(must)]])


@pytest.mark.parametrize(
    "propagator", [TSP(rate=0.2, layer=1, window=4), AdaptiveTSP(rate=0.2, tau=9.0, observed=2, first=1, window=4)]
)
def test_what_is_held_goes_on(model, batch, propagator):
    ids, mask = batch
    with kvsieve.attach(model, kvsieve.Plan(propagate=propagator)) as sieve:
        free = sieve.generate(ids, mask, max_new_tokens=1, **GREEDY)
        few = sieve.generate(ids, mask, max_new_tokens=1, protect=SPANS, quotas=QUOTAS, chunk=50, **GREEDY)
        # More than may propagate: 16 + 14 + 10 + 4 and 50 + 4 with the window. They go on all the same.
        many = sieve.generate(ids, mask, max_new_tokens=1, protect=[(10, 60)], **GREEDY)
    assert [each.stats.deep_tokens for each in (free, few, many)] == [40, 44, 54]
    assert is_held(few.cache, (0, PADDING)) and is_held(many.cache, (0, PADDING), [(10, 60)], [])
    deep = stored(many.cache, (0, PADDING))[0][-1][0]
    assert deep == sorted([*range(10, 60), *range(196, 200)])


@dataclass(frozen=True)
class Latest(Evictor, takes_quotas=True):
    """A third party's evictor that knows nothing of what must stay."""

    budget: Budget = Budget(ratio=0.5)

    def select(self, ctx, counts):
        slots = torch.arange(ctx.keys.shape[2] - counts[0], ctx.keys.shape[2])
        return Selection(slots.expand(*ctx.keys.shape[:2], -1).clone())


@dataclass(frozen=True)
class LatestOn(Propagator):
    def source(self, num_layers):
        return 1

    def select(self, ctx):
        if ctx.layer_idx == 1:
            return Selection(torch.arange(ctx.offered - 50, ctx.offered)[None])


def test_whoever_drops_what_is_held_is_named(model, batch):
    ids = batch[0][:1]
    with kvsieve.attach(model, kvsieve.Plan(evict=Latest())) as sieve:
        assert is_held(sieve.prefill(ids, protect=[(150, 160)]), spans=[(150, 160)], quotas=[])
        with pytest.raises(PlanError, match="Latest at layer 0: it drops 3 protected.*does not honour protect="):
            sieve.prefill(ids, protect=[(97, 103)])
        with pytest.raises(PlanError, match="a quota 2 entries short in a head: it does not honour quotas="):
            sieve.prefill(ids, quotas=[((90, 110), 12)])
    with kvsieve.attach(model, kvsieve.Plan(propagate=LatestOn())) as sieve:
        with pytest.raises(PlanError, match="LatestOn at layer 1: it drops 10 protected"):
            sieve.prefill(ids, protect=[(0, 10)])


REFUSED = {
    r"protect: the span \(190, 201\) lies outside row 0, whose prompt has 200 tokens": {"protect": [(190, 201)]},
    r"protect: the span \(185, 195\) lies outside row 1, whose prompt has 189 tokens": {"protect": [[], [(185, 195)]]},
    r"the span \(5, 5\) lies outside row 0": {"protect": [(5, 5)]},
    r"the span \(-3, 5\) lies outside row 0": {"protect": [(-3, 5)]},
    r"protect is a list like \[\(0, 40\), \(100, 120\)\].*got \(0, 40\)": {"protect": (0, 40)},
    "protect has lists for 3 rows, the prompt has 2": {"protect": [[], [], [(0, 1)]]},
    "quotas is a list like": {"quotas": [(0, 40)]},
    r"quotas: the span \(8, 20\) of row 0 overlaps another": {"quotas": [((0, 9), 2), ((8, 20), 2)]},
    r"11 entries are asked of the span \(0, 10\) of row 0, which has 10": {"quotas": [((0, 10), 11)]},
    r"quotas: \(0, 10\) of row 0: Budget": {"quotas": [((0, 10), 1.5)]},
    r"hold 78 of the 200 tokens of row 0; with the 5 that SnapKV needs.*budget of 80 entries: raise budget= to 83": {
        "protect": [(0, 70)],
        "quotas": [((60, 90), 18)],
    },
    "hold 72 of the 189 tokens of row 1; with the 5 that SnapKV needs": {"protect": [(0, 72)]},
    "question_tokens=189 leaves nothing of a row's 189 new tokens": {"question_tokens": 189},
    "question_tokens is the number of tokens at the prompt's end": {"question_tokens": 2.0},
    "reduce=False keeps the whole prompt, so question_tokens=": {"question_tokens": 3, "reduce": False},
}


@pytest.mark.parametrize("message", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_honoured_is_refused_before_anything_runs(model, batch, message):
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget="40%", window=4)) as sieve:
        cache = sieve.new_cache()
        with pytest.raises(InputError, match=message):
            sieve.generate(*batch, cache=cache, **REFUSED[message], **GREEDY)
        assert cache.num_seen == 0 and cache.conversation.protected is None


def test_a_short_prompt_may_be_held_whole(model, batch):
    ids = batch[0][:1, :60]
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=64, window=4)) as sieve:
        assert sieve.prefill(ids, protect=[(0, 60)]).entries() == [60] * 4
    with kvsieve.attach(model, kvsieve.plan("gemfilter", budget=30, layer=1)) as sieve:
        with pytest.raises(InputError, match="hold 31 of the 60 tokens, and 'gemfilter' reads only 30 of them again"):
            sieve.prefill(ids, protect=[(0, 31)])


def test_tokens_of_an_earlier_turn_can_be_held_only_while_they_are_there(model, batch):
    ids = batch[0][:1]
    with kvsieve.attach(model, kvsieve.plan("streamingllm", budget=40, sinks=4)) as sieve:
        cache = sieve.prefill(ids[:, :120], protect=[(50, 55)])
        with pytest.raises(InputError, match="an earlier turn, which layer 0 no longer holds"):
            sieve.prefill(ids, cache=cache, protect=[(80, 90)])
        with pytest.raises(InputError, match="overlaps one of an earlier turn"):
            part = sieve.prefill(ids[:, :120], quotas=[((100, 110), 3)])
            sieve.prefill(ids, cache=part, quotas=[((105, 108), 1)])
        sieve.prefill(ids, cache=cache, protect=[(100, 103), (140, 143)], quotas=[((110, 130), 4)])
        assert is_held(cache, spans=[(0, 4), (50, 55), (100, 103), (140, 143)], quotas=[((110, 130), 4)])


def test_what_a_later_mask_hides_need_not_stay(model, batch):
    ids = batch[0][:1].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, 10:13] = 0
    with kvsieve.attach(model, kvsieve.plan("streamingllm", budget=40, sinks=4)) as sieve:
        cache = sieve.prefill(ids[:, :150], protect=[(8, 16)])
        sieve.prefill(ids, mask, cache=cache)
        first, second = stored(cache, (0, 0))
    ends = [*range(4), 8, 9, *range(13, 16), *range(200 - 31, 200)], [*range(4), *range(8, 16), *range(172, 200)]
    assert first == [[ends[0]] * 2] * 4 and second == [[ends[1]] * 2] * 4
    with kvsieve.attach(model, plan_of("lagkv", model)) as sieve:
        cache = sieve.prefill(ids[:, :150], protect=[(8, 16)])
        with pytest.raises(InputError, match="LagKV cuts rows into partitions and cannot leave out tokens"):
            sieve.prefill(ids, mask, cache=cache)


def test_layers_can_be_left_out(model, batch):
    ids = batch[0][:1]
    for name in METHODS:
        info = kvsieve.method_info(name)
        if "skip_layers" in info.parameters:
            with kvsieve.attach(model, plan_of(name, model, skip_layers=(0, -1))) as sieve:
                cache = sieve.prefill(ids)
            entries, came = cache.entries(), cache.turn.record.propagated or LENGTH
            # A layer that is not lazy keeps everything.
            some = min if name == "simlayerkv" else max
            assert (entries[0], entries[3]) == (LENGTH, came) and some(entries[1:3]) < LENGTH, name
            # Where tokens are dropped on their way, the last layer has no others.
            assert (came < LENGTH) is (name in ("asl", "claa", "fastkv", "staged")), name
    with kvsieve.attach(model, kvsieve.plan("knorm", budget=50, skip_layers=2)) as sieve:
        assert sieve.prefill(ids).entries() == [200, 200, 50, 50]
    for layers in ("0/-1", [0, -1]):
        plan = kvsieve.plan("snapkv", skip_layers=layers)
        assert plan.evict.skip_layers == (0, -1) and kvsieve.Plan.from_dict(plan.to_dict()) == plan
    for layers in (-1, 1.5, True, "a", (1, "b")):
        with pytest.raises(PlanError, match="skip_layers must be"):
            kvsieve.plan("h2o", skip_layers=layers)


@pytest.mark.parametrize(
    ("option", "layers"),
    [("skip_layers", 5), ("skip_layers", (0, 4)), ("skip_layers", (-5,)), ("share", (0, 4))],
    ids=str,
)
def test_layers_outside_the_model_are_refused_by_every_method(model, option, layers):
    """Readers and sparse prefill had read densely in silence."""
    infos = [kvsieve.method_info(name) for name in kvsieve.list_methods()]
    names = [info.name for info in infos if option in info.parameters and (option != "share" or "read" in info.roles)]
    assert {"skip_layers": {"snapkv", "quest", "xattention", "compactattention"}, "share": {"quest"}}[option] <= {
        *names
    }
    match = f"{option}={re.escape(str(layers))} lies outside the model, which has 4 layers"
    for name in names:
        plan = plan_of(name, model, **{option: layers})
        with pytest.raises(PlanError, match=match), kvsieve.attach(model, plan):
            pass


QUESTION = 12


# RocketKV leaves room for the answer, of which prefill has not been told.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "rocketkv"] + SPARSE_PROMPTS)
def test_a_question_is_not_seen_and_kept_whole(model, batch, name):
    ids, mask = batch
    plan = plan_of(name, model)
    # Which blocks of a prompt are computed depends on the chunks.
    chunk = 64 if plan.prefill is None else None
    with kvsieve.attach(model, plan) as sieve:
        asked = sieve.generate(ids, mask, question_tokens=QUESTION, max_new_tokens=3, **GREEDY)
        alone = sieve.generate(ids[1:, PADDING:], question_tokens=QUESTION, chunk=chunk, max_new_tokens=3, **GREEDY)
        cache = sieve.prefill(ids[:, :-QUESTION], mask[:, :-QUESTION])
        context = stored(cache, (0, PADDING))
        apart = sieve.generate(ids, mask, cache=cache, reduce=False, max_new_tokens=3, **GREEDY)
    assert torch.equal(asked.sequences, apart.sequences)
    assert torch.equal(asked.sequences[1, PADDING:], alone.sequences[0])
    stats = asked.stats
    assert stats.applied and stats.prompt_tokens == LENGTH and not apart.stats.applied
    assert apart.stats.notes == ["the plan did not act on this turn's prompt, as asked (reduce=False)"]
    assert stats.kv_entries == apart.stats.kv_entries
    if plan.propagate is not None:
        assert QUESTION < stats.deep_tokens < LENGTH
    if plan.acts_once or plan.shortens_prompt:
        numbers = (range(LENGTH - QUESTION, LENGTH + 2), range(LENGTH - PADDING - QUESTION, LENGTH - PADDING + 2))
        for row, before, after in zip(numbers, context, stored(asked.cache, (0, PADDING)), strict=True):
            assert after == [[[*head, *row] for head in layer] for layer in before]


def test_a_turn_is_kept_whole_chunk_by_chunk(model, batch):
    ids = batch[0][:1]
    with kvsieve.attach(model, plan_of("lagkv", model, chunks=True)) as sieve:
        cache = sieve.prefill(ids[:, :100])
        before = cache.entries()
        assert sieve.prefill(ids, cache=cache, chunk=20, reduce=False).entries() == [n + 100 for n in before]
        assert sieve.prefill(ids, chunk=20, reduce=False).entries() == [200] * 4


def test_a_turn_that_is_kept_whole_is_bounded_while_decoding(model, batch):
    ids = batch[0][:1]
    with kvsieve.attach(model, kvsieve.plan("h2o", budget=60)) as sieve:
        cache = sieve.prefill(ids[:, :180])
        result = sieve.generate(ids, cache=cache, reduce=False, max_new_tokens=9, **GREEDY)
        assert result.stats.kv_entries == [80] * 4 and cache.entries() == [60] * 4
        again = sieve.generate(torch.cat([result.sequences, ids[:, :9]], 1), cache=cache, max_new_tokens=1, **GREEDY)
        assert again.stats.applied and again.stats.kv_entries == [60] * 4


TEMPLATE = "{% for m in messages %}{{ '[BOS] ' + m['role'] + ' ' + m['content'] + ' [EOS] ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w99 ' }}{% endif %}"  # noqa: E501
CHAT = [
    {"role": "system", "content": "w1 w2"},
    {"role": "user", "content": "w3 w4 w5"},
    {"role": "assistant", "content": "w6"},
    {"role": "user", "content": "w7"},
]


def test_messages_are_found_by_their_role():
    tokenizer = word_tokenizer(TEMPLATE)
    ids, spans = role_spans(tokenizer, CHAT)
    assert ids.shape == (1, 5 + 6 + 4 + 4 + 1) and spans == [(0, 5)]
    assert role_spans(tokenizer, CHAT, "user")[1] == [(5, 11), (15, 19)]
    assert role_spans(tokenizer, CHAT, ("system", "assistant"))[1] == [(0, 5), (11, 15)]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ messages[-1]['content'] }} {{ messages[0]['content'] }}", "writes the first 1 messages differently"),
        ("{% if messages|length == 1 %}{{ raise_exception('too few') }}{% endif %}w1", "refuses the first 1 messages"),
    ],
)
def test_messages_that_cannot_be_found_are_refused(template, message):
    with pytest.raises(InputError, match=message):
        role_spans(word_tokenizer(template), CHAT)
    with pytest.raises(InputError, match="no message has a role among tool: the roles are system, user, assistant"):
        role_spans(word_tokenizer(TEMPLATE), CHAT, "tool")

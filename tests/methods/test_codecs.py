"""What each codec loses and takes, attention over what it holds, and what an evictor drops kept in few bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvsieve
from attend import packed_attention
from kvsieve.cache import DenseStore, PackedStore
from kvsieve.cache.body import Body
from kvsieve.cache.pool import BlockPool
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.compat import CACHE
from kvsieve.kernels.cpu import packed as native
from kvsieve.methods import FP8, HQQ, K8V4, KIVI, Int8, Outlier, Rotated, SnapKV
from kvsieve.planning.plans import Plan
from tiny import tiny_model, tiny_prompt

ROWS, BLOCKS, BLOCK, DIM = 2, 3, 32, 64
# Bits per number that each is said to take, of keys and values.
CODECS = {
    "int8": (Int8(block=BLOCK), 8 + 16 / DIM, 8 + 16 / DIM),
    "fp8": (FP8(block=BLOCK), 8 + 16 / BLOCK, 8 + 16 / BLOCK),
    "k8v4": (K8V4(block=BLOCK), 8 + 32 / BLOCK, 4 + 32 / 64),
    "kivi 8": (KIVI(bits=8, block=BLOCK), 8 + 32 / BLOCK, 8 + 32 / 64),
    "kivi 3": (KIVI(bits=3, block=BLOCK, group=16), 3 + 32 / BLOCK, 3 + 32 / 16),
    "hqq 4": (HQQ(block=BLOCK), 4 + 32 / BLOCK, 4 + 32 / 64),
    "hqq 2": (HQQ(bits=2, block=BLOCK), 2 + 32 / BLOCK, 2 + 32 / 64),
    "outlier 4": (Outlier(block=BLOCK), 4 + 32 / BLOCK + 20 * 32 / 2048, 4 + 32 / 64 + 20 * 32 / 2048),
    "rotated 4": (Rotated(block=BLOCK), 4 + 16 / DIM, 4 + 16 / DIM),
    "rotated 3": (Rotated(bits=3, block=BLOCK), 3 + 16 / DIM, 3 + 16 / DIM),
    "rotated 2": (Rotated(bits=2, block=BLOCK), 2 + 16 / DIM, 2 + 16 / DIM),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def body_of(codec, keys, values):
    """Encoded entries of KV rows, keys and values [R, N, D]."""
    rows, size, dim = keys.shape
    made = Body(codec, rows, (dim, values.shape[2]), torch.float32, keys.device)
    blocks = size // codec.block
    index = torch.arange(size, dtype=torch.int32).repeat(rows).view(-1, codec.block)
    numbers = torch.arange(rows).repeat_interleave(blocks)
    made.add(*(part.reshape(rows * blocks, codec.block, -1) for part in (keys, values)), index, numbers)
    return made


def errors(codec, keys, values):
    made = body_of(codec, keys, values)
    return [(made.padded(what) - x).square().mean().item() for what, x in (("keys", keys), ("values", values))]


@pytest.mark.parametrize("name", CODECS)
def test_bits_are_as_stated_and_as_allocated(name):
    codec, *stated = CODECS[name]
    made = body_of(codec, normal(ROWS, BLOCKS * BLOCK, DIM), normal(ROWS, BLOCKS * BLOCK, DIM, seed=1))
    numbers = ROWS * BLOCKS * BLOCK * DIM
    for part, bits in zip((made.keys, made.values), stated, strict=True):
        assert part.form.bits_per_number(DIM, BLOCK) == pytest.approx(bits)
        assert 8 * sum(each.nbytes for each in part.codes.tensors()) == pytest.approx(bits * numbers)
        # Beside the codes there is no more than a mean and a root for each channel of a KV row.
        assert sum(each.nbytes for each in part.tensors()) <= bits * numbers / 8 + 2 * 4 * ROWS * DIM


def test_fewer_bits_lose_more():
    keys, values = normal(ROWS, 256, DIM), normal(ROWS, 256, DIM, seed=1)
    for kind, all_bits in ((KIVI, (8, 4, 3, 2)), (HQQ, (8, 4, 3, 2)), (Outlier, (8, 4, 3, 2)), (Rotated, (4, 3, 2))):
        found = [errors(kind(bits=bits), keys, values) for bits in all_bits]
        assert all(less < more for a, b in itertools.pairwise(found) for less, more in zip(a, b, strict=True))
    # The best codebook beats evenly spread levels at fewer bytes; outliers apart, and better zeros, help them.
    for bits in (2, 3, 4):
        kivi, *better = (sum(errors(kind(bits=bits), keys, values)) for kind in (KIVI, HQQ, Outlier, Rotated))
        assert all(each < kivi for each in better)
    # Of normally distributed numbers hardly more than the least there can be.
    assert errors(Rotated(bits=2), keys, values)[1] == pytest.approx(0.1175, rel=0.1)
    assert errors(K8V4(), keys, values) == [
        errors(KIVI(bits=8), keys, values)[0],
        errors(KIVI(bits=4), keys, values)[1],
    ]


def attention(codec, keys, values, query, **options):
    store = DenseStore()
    index = torch.arange(keys.shape[2])[None]
    store.append(keys, values, index)
    packed = PackedStore.build(store, codec)
    assert packed.bodies[-1].width
    return packed_attention(query, packed, scale=keys.shape[-1] ** -0.5, **options)


def exact_attention(keys, values, query):
    keys, values = (part.repeat_interleave(query.shape[1] // keys.shape[1], 1) for part in (keys, values))
    return torch.softmax(query @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5, -1) @ values


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dim", [64, 48])
def test_kernel_and_plain_torch_agree(name, dim):
    if native.reason() is not None:
        pytest.skip(native.reason())
    given = CODECS[name][0]
    if dim == 48 and hasattr(given, "group"):
        given = type(given)(**{**vars(given), "group": 16})
    keys, values, query = normal(1, 2, 140, dim), normal(1, 2, 140, dim, seed=1), normal(1, 6, 1, dim, seed=2)
    plain, compiled = (attention(given, keys + 2, values, query, kernel=kernel) for kernel in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=2e-4, atol=2e-4)
    exact = exact_attention(keys + 2, values, query)
    assert (plain - exact).norm() / exact.norm() < (0.9 if "2" in name else 0.25)


@pytest.mark.parametrize("planted", ["scaled", "shifted"])
def test_a_large_key_channel(planted):
    """A channel 50 times as large as the others, or with a large constant: scales of its own, or a turn, save them."""
    keys, values, query = normal(1, 2, 300, DIM), normal(1, 2, 300, DIM, seed=1), normal(1, 4, 1, DIM, seed=2) * 2
    if planted == "scaled":
        # As a model would have it: its queries are as much smaller there.
        keys[..., 5] *= 50
        query[..., 5] /= 50
    else:
        keys[..., 5] += 50
    exact = exact_attention(keys, values, query)

    def lost(codec):
        return ((attention(codec, keys, values, query) - exact).norm() / exact.norm()).item()

    per_token = lost(_PerToken())
    assert per_token > 0.5
    for codec in (KIVI(), HQQ(), Outlier(), Rotated()):
        assert lost(codec) < 0.2 < per_token / 2, type(codec).__name__


class _PerToken(KIVI, heads="own"):
    """4 bits per token, keys and values."""

    def keys(self, dim):
        return self.values(dim)


def test_floats_have_one_scale_per_block():
    keys = normal(ROWS, BLOCK, DIM) * torch.logspace(-2, 1, DIM)
    made = body_of(FP8(block=BLOCK), keys, keys)
    scale = made.keys.codes.scale
    assert scale.shape == (ROWS, 1, DIM) and bool((scale == scale[..., :1]).all())
    torch.testing.assert_close(scale[:, 0, 0].float(), keys.abs().amax((1, 2)) / 448, rtol=1e-3, atol=0)
    assert bool(((made.padded("keys") - keys).abs() <= keys.abs() / 16 + scale.float() * 2**-10).all())


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda: KIVI(bits=5), "bits must be one of 2, 3, 4, 8, got 5"),
        (lambda: Rotated(bits=8), "bits must be one of 2, 3, 4, got 8"),
        (lambda: K8V4(value_bits=6), "value_bits must be one of"),
        (lambda: Outlier(share=0.0), "share must be a number above 0"),
        (lambda: HQQ(rounds=0), "rounds must be a whole number from 1 to 100"),
        (lambda: Int8(block=4), "block must be a whole number of at least 8"),
        (lambda: kvsieve.plan("snapkv", codec="kivi:bit=4"), "kivi has no parameter 'bit'; did you mean 'bits'"),
        (lambda: kvsieve.plan("snapkv", codec="snapkv"), "snapkv is no codec; codecs are fp8, hqq, int8, k8v4"),
    ],
)
def test_what_a_codec_does_not_have_is_refused(made, message):
    with pytest.raises(PlanError, match=message):
        made()


def test_blocks_whose_places_16_bits_cannot_tell():
    with pytest.raises(UnsupportedModelError, match=r"1024 channels, and a block of 128 .* set block=64"):
        Outlier().keys(1024)
    Outlier(block=64).keys(1024)


# What an evictor would drop, in few bits.


def test_rest_reads_as_it_is_meant():
    plan = kvsieve.plan("snapkv", budget="20%", rest="2bit")
    assert plan.roles == ("evict", "rest") and plan.rest == Rotated(bits=2) and plan.codec is None
    assert kvsieve.plan("snapkv", rest="kivi:bits=2:block=32").rest == KIVI(bits=2, block=32)
    assert kvsieve.plan("snapkv", rest=KIVI(), codec="int8").codecs == (Int8(), KIVI())
    assert Plan.from_dict(plan.to_dict()) == plan
    mixed = kvsieve.plan("mixed", budget="30%", bits=3)
    assert mixed.evict == kvsieve.plan("snapkv", budget="30%").evict and mixed.rest == Rotated(bits=3)


@pytest.mark.parametrize(
    "method, given, message",
    [
        ("full", {}, "this plan has none; give evict=, or codec= to encode all entries"),
        ("perturn", {}, "PerTurn drops nothing"),
        ("finch", {"question_tokens": 4}, "Finch drops entries while a prompt is read"),
        ("snapkv", {"every": 8}, "SnapKV drops entries while decoding; leave every= out"),
        ("cake", {}, "CAKE drops entries of a layer bit by bit"),
        ("expectedattention", {}, "ExpectedAttention remembers"),
        ("snapkv", {"budget": "1MiB"}, "give a share or a number of entries"),
        ("mixed", {}, "mixed keeps the rest itself"),
    ],
)
def test_where_there_is_no_rest_to_keep(method, given, message):
    with pytest.raises(PlanError, match=message):
        kvsieve.plan(method, rest="2bit", **given)
    for bad in ("5bit", "snapkv", 2):
        with pytest.raises(PlanError):
            kvsieve.plan("snapkv", rest=bad)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.mark.parametrize("codec", [None, KIVI(bits=8, block=16, tail=16)], ids=["exact", "encoded"])
@pytest.mark.parametrize("method", ["snapkv", "adakv"], ids=["even", "ragged"])
def test_nothing_is_lost_and_what_is_kept_is_exact(model, method, codec, tmp_path):
    """Two turns of a padded batch: everything is stored, what the evictor chose as it was, all else in few bits."""
    made = torch.Generator().manual_seed(5)
    ids, more = (torch.randint(2, 120, (2, size), generator=made) for size in (90, 40))
    mask = torch.ones_like(ids)
    ids[1, :7] = mask[1, :7] = 0
    plan = kvsieve.plan(method, budget=30, window=4, rest=KIVI(bits=8, block=16), codec=codec, paper=True)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=5, return_dict_in_generate=True)
    with kvsieve.attach(model, Plan()) as sieve:
        full = [layer.store for layer in sieve.prefill(ids, mask).sieve_layers.values()]
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        stores = [layer.store for layer in sieve.prefill(ids, mask).sieve_layers.values()]
        result = sieve.generate(ids, mask, **options)
        sieve.save(result.cache, tmp_path / "talk", ids=result.sequences)
        both = torch.cat([mask, torch.ones(2, 45, dtype=mask.dtype)], 1)
        ends = []
        for cache in (result.cache, sieve.load(tmp_path / "talk").cache):
            later = sieve.generate(torch.cat([result.sequences, more], 1), both, cache=cache, **options)
            ends.append([layer.store for layer in later.cache.sieve_layers.values()])
    for store, whole in zip(stores, full, strict=True):
        assert store.lengths == (90, 83) and store.bodies[0].width >= 53
        for row, pad in enumerate((0, 7)):
            for head in range(store.heads):
                real = store.index[row, head] >= 0 if store.valid is None else store.valid[row, head]
                at = store.index[row, head][real].long()
                # In the order of the tokens, each once.
                assert at.tolist() == list(range(pad, 90))
                mine, theirs = store.keys[row, head][real], whole.keys[row, head, at]
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0.05)
                if codec is None:
                    assert (mine == theirs).all(-1).sum() >= (15 if method == "adakv" else 30)
    for store, again in zip(*ends, strict=True):
        # 90, an answer of 5, 40 and an answer, of which the last token has no entry.
        assert store.lengths == (139, 132) and store.bodies[0].counts.min() > 53
        assert torch.equal(store.keys, again.keys) and torch.equal(store.index, again.index)


def test_keeping_the_rest_is_nearer_to_full_kv_than_dropping_it(model):
    ids = tiny_prompt(1, 200, seed=3)
    found = {}
    for name, given in {"full": None, "dropped": {}, "2bit": {"rest": "2bit"}, "4bit": {"rest": "4bit"}}.items():
        plan = Plan() if given is None else kvsieve.plan("snapkv", budget=20, window=8, paper=True, **given)
        with kvsieve.attach(model, plan) as sieve, torch.no_grad():
            cache = sieve.prefill(ids)
            out = model(input_ids=torch.tensor([[7]]), **{CACHE: cache}, use_cache=True)
        found[name] = out.logits[0, -1]
    lost = [(found[name] - found["full"]).norm().item() for name in ("4bit", "2bit", "dropped")]
    assert lost[0] < lost[1] < lost[2]


def test_query_heads_that_keep_their_own_have_no_rest():
    with pytest.raises(PlanError, match="leave per_query_head out, or rest="):
        Plan(evict=SnapKV(budget=20, window=4, per_query_head=True), rest=KIVI())


def test_keys_in_more_bits_than_rotated_values():
    """At the bytes of 3 bits, keys and values are told by the formats that they share with other codecs."""
    codec = kvsieve.plan("k8v4", key_bits=4, value_bits=2, rotate_values=True).codec
    rotated = kvsieve.plan("rotated", bits=2).codec
    assert codec.keys(64) == kvsieve.plan("kivi", bits=4).codec.keys(64) and codec.values(64) == rotated.values(64)
    bits = [form.bits_per_number(64, 128) for form in (codec.keys(64), codec.values(64))]
    assert sum(bits) / 2 == kvsieve.plan("rotated", bits=3).codec.values(64).bits_per_number(64, 128) == 3.25
    x, line = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.int64)
    made = [BlockPool(each.values(64), 64) for each in (codec, rotated)]
    ours, theirs = (
        pool.decode(pool.encode(each, x, line[:2], line[:1] == 0), line[:2], torch.float32)
        for pool, each in zip(made, (codec, rotated), strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(PlanError, match="8 bits are not rotated"):
        kvsieve.plan("k8v4", value_bits=8, rotate_values=True)

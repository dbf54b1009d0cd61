"""Composite models: text prompts like any other model's, and prompts with images where the laws hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import logging

import kvsieve
from kvsieve.cache import DenseStore
from kvsieve.decoding.loop import feed_rows
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.prompt.embed import embed_prompt
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from masking import mask_instead
from tiny_models import build

logging.set_verbosity_error()

GENERATE: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
IMAGE = 120
SNAPKV = kvsieve.plan("snapkv", budget=16, window=4)
FASTKV = kvsieve.plan("fastkv", budget=16, tsp_rate=0.5, tsp_layer=1, window=4)
ROCKETKV = kvsieve.plan("rocketkv", budget=16, window=4, kernel=5)
AXES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")


def prompt_with_image(model, name, seed=0):
    """A prompt with one image in its middle, and the arguments that bring the image."""
    random = torch.Generator().manual_seed(seed)
    vision, marks = model.config.vision_config, ()
    if name in AXES:
        patch, merge = vision.patch_size, vision.spatial_merge_size
        pixels = torch.randn(16, 3 * vision.temporal_patch_size * patch**2, generator=random, dtype=torch.float64)
        given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        tokens, marks = 16 // merge**2, (122, 123)
    else:
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        given = {"pixel_values": torch.randn(1, 3, size, size, generator=random, dtype=torch.float64)}
        if name == "mistral3":
            given["image_sizes"] = torch.tensor([[size, size]])
        found = model.get_image_features(**given).pooler_output
        tokens = sum(part.numel() for part in found) // model.config.get_text_config().hidden_size
    before, after = torch.randint(2, IMAGE - 1, (2, 20), generator=random)
    middle = torch.tensor([*marks[:1], *[IMAGE] * tokens, *marks[1:]])
    ids = torch.cat([before, middle, after])[None]
    if name in AXES:
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    return ids, given


def worst(ours, theirs) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours.logits, theirs.logits, strict=True))


@pytest.mark.parametrize("name", ["llava", "mistral3", "internvl", "aria", *AXES])
def test_an_image_is_read_like_other_tokens(name, monkeypatch):
    """Full KV is the model's own output, evicting equals masking, readers read; the image takes part in it."""
    model = build(name, dtype=torch.float64)
    ids, image = prompt_with_image(model, name)
    own, blind = model.generate(ids, **image, **GENERATE), model.generate(ids, **GENERATE)
    assert worst(own, blind) > 0.01
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        assert worst(sieve.generate(ids, **image, **GENERATE).output, own) < 1e-6
        assert worst(model.generate(ids, **image, **GENERATE), own) < 1e-6
    for plan in (SNAPKV, FASTKV):
        with kvsieve.attach(model, plan) as sieve:
            found = sieve.generate(ids, **image, **GENERATE)
            with monkeypatch.context() as patch:
                patch.setattr(DenseStore, "keep", mask_instead)
                masked = sieve.generate(ids, **image, **GENERATE)
        assert found.stats.applied and worst(found.output, masked.output) < 1e-5
        assert found.stats.deep_tokens == (ids.shape[1] if plan is SNAPKV else ids.shape[1] // 2)
        assert [count for count in found.stats.kv_entries if count] == [16] * len(sieve.new_cache().sieve_layers)
    with kvsieve.attach(model, ROCKETKV) as sieve:
        assert sieve.generate(ids, **image, **GENERATE).stats.applied
    assert worst(model.generate(ids, **image, **GENERATE), own) == 0


@pytest.mark.parametrize("name", ["mistral3", "qwen2_5_vl"])
def test_what_could_not_be_honoured_is_refused(name):
    model = build(name, dtype=torch.float64)
    ids, image = prompt_with_image(model, name)
    more = torch.randint(2, IMAGE - 1, (1, 5))
    with kvsieve.attach(model, SNAPKV) as sieve:
        with pytest.raises(UnsupportedOptionError, match="image_token.*read in one piece only"):
            sieve.generate(ids, chunk=16, **image, **GENERATE)
        with pytest.raises(InputError, match="cache takes what"):
            sieve.generate(ids, cache="x", chunk=16, **image, **GENERATE)
        with pytest.raises(UnsupportedOptionError, match="read in one piece only"):
            sieve.prefill(ids)
        result = sieve.generate(ids, **image, **GENERATE)
        longer = torch.cat([result.sequences, more], 1)
        if name == "qwen2_5_vl":
            with pytest.raises(UnsupportedOptionError, match="positions on several axes"):
                sieve.generate(longer, cache=result.cache, **GENERATE)
        else:
            assert sieve.generate(longer, cache=result.cache, **GENERATE).stats.applied
        cache = sieve.prefill(ids[:, :10])
        with pytest.raises(
            UnsupportedOptionError, match="images and the like are read with the first prompt|in one piece only"
        ):
            sieve.generate(ids, cache=cache, **image, **GENERATE)
    with kvsieve.attach(model, kvsieve.plan("gemfilter", budget=16)) as sieve:
        with pytest.raises(UnsupportedOptionError, match="read in one piece only.*gemfilter"):
            sieve.generate(ids, **image, **GENERATE)


def test_images_whose_tokens_see_each_other_both_ways_are_refused():
    model = build("gemma3", dtype=torch.float64)
    ids, image = prompt_with_image(model, "gemma3")
    image["token_type_ids"] = (ids == IMAGE).long()
    with kvsieve.attach(model, SNAPKV) as sieve:
        with pytest.raises(UnsupportedOptionError, match="see each other both ways"):
            sieve.generate(ids, **image, **GENERATE)
        with pytest.raises(UnsupportedOptionError, match="see each other both ways"):
            embed_prompt(sieve, ids, image)
        text = torch.randint(2, IMAGE - 1, (1, 40))
        assert sieve.generate(text, **GENERATE).stats.applied


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_text_in_several_turns(name):
    """Two turns, in chunks, equal one prompt; a padded row equals the row alone."""
    model = build(name, dtype=torch.float64)
    ids = torch.randint(2, IMAGE - 1, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :6], mask[1, :6] = 0, 0
    near = 5e-4 if name == "qwen3_5" else 1e-5
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole = sieve.generate(ids, mask, **GENERATE).output
        alone = sieve.generate(ids[1:, 6:], **GENERATE).output
        cache = sieve.prefill(ids[:, :25], mask[:, :25], chunk=8)
        turns = sieve.generate(ids, mask, cache=cache, chunk=8, **GENERATE).output
    assert worst(turns, whole) < near
    assert max((a[1:] - b).abs().max().item() for a, b in zip(whole.logits, alone.logits, strict=True)) < near


def read_in_chunks(sieve, cache, ids, chunk, tokens=4):
    """Logits of a prompt's end and of an answer, the prompt read in chunks."""
    left, mask = read_prompt(sieve, ids, None, cache, ReadOptions(chunk, tokens))
    found = [sieve.feed(cache, left[:, cache.num_seen :], mask, logits=1).logits[:, -1]]
    cache.embedded = None
    while len(found) < tokens:
        found.append(sieve.feed(cache, found[-1].argmax(-1)[:, None], None, logits=1).logits[:, -1])
    return found


def apart(found, result) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, result.output.logits, strict=True))


@pytest.mark.parametrize("name", ["llava", "mistral3", "internvl", "aria", *AXES])
def test_an_embedded_prompt_is_read_in_chunks_as_in_one_piece(name):
    """Borders lie within the image; answers go on, and so do later turns, at the right positions."""
    model = build(name, dtype=torch.float64)
    ids, image = prompt_with_image(model, name)
    near = 5e-4 if name == "qwen3_5" else 1e-6
    for plan in (kvsieve.plan("full"), SNAPKV, FASTKV):
        with kvsieve.attach(model, plan) as sieve:
            whole = sieve.generate(ids, **image, **GENERATE)
            embedded = embed_prompt(sieve, ids, image)
            cache = sieve.new_cache()
            cache.embedded = embedded
            assert apart(read_in_chunks(sieve, cache, ids, 11), whole) < near
            if plan.evict is not None:
                assert cache.entries() == whole.cache.entries()
                continue
            # Joint passes of the server, and a turn of text.
            own = cache.fork()
            said = whole.sequences[:, -1:]
            (joint, _), _ = feed_rows(sieve, [own, cache.fork()], [said, said])
            longer = torch.cat([whole.sequences, torch.tensor([[5, 6, 7, 8]])], 1)
            marks = {**image, "mm_token_type_ids": (longer == IMAGE).long()} if name in AXES else image
            again = sieve.generate(longer, **marks, **GENERATE)
            assert apart(read_in_chunks(sieve, cache, longer, 3), again) < near
            shorter = {**marks, "mm_token_type_ids": marks["mm_token_type_ids"][:, :-4]} if name in AXES else image
            next_token = sieve.generate(whole.sequences, **shorter, **GENERATE).output.logits[0]
            assert (joint[:, -1] - next_token).abs().max().item() < near


def test_a_copy_of_a_cache_reads_no_images():
    model = build("llava", dtype=torch.float64)
    ids, image = prompt_with_image(model, "llava")
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.new_cache()
        cache.embedded = embed_prompt(sieve, ids, image)
        with pytest.raises(UnsupportedOptionError, match="image_token.*read in one piece only"):
            sieve.feed(cache.fork(), ids, None)
        with pytest.raises(UnsupportedOptionError, match="more than the tokens of the prompt"):
            sieve.feed(cache, torch.cat([ids, ids], 1), None)
        with pytest.raises(InputError, match="the model refuses the images"):
            embed_prompt(sieve, ids[:, :24], image)
    with kvsieve.attach(build("llama"), kvsieve.plan("full")) as sieve:
        with pytest.raises(UnsupportedOptionError, match="reads text alone"):
            embed_prompt(sieve, ids, image)


def test_an_answer_may_hold_the_token_of_an_image():
    model = build("llava", dtype=torch.float64)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(torch.arange(3, 40)[None])
        token = torch.tensor([[IMAGE]])
        sieve.feed(cache, token, None)
        sieve.feed(cache, torch.cat([token, token], 1), None, PassRequest(tentative=True)).transaction.accept([2])
        assert cache.num_seen == 40


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_text_in_chunks_after_another_prompts_image(name):
    """transformers leaves the image's shift of positions on the model."""
    model = build(name, dtype=torch.float64)
    ids, image = prompt_with_image(model, name)
    text = torch.randint(2, IMAGE - 1, (1, 40), generator=torch.Generator().manual_seed(2))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        before = sieve.generate(text, chunk=16, **GENERATE).output
        sieve.generate(ids, **image, **GENERATE)
        assert worst(sieve.generate(text, chunk=16, **GENERATE).output, before) < 1e-9
        sieve.generate(ids, **image, **GENERATE)
        cache = sieve.prefill(text[:, :30])
        assert worst(model.generate(text, past_key_values=cache, **GENERATE), before) < (
            5e-4 if name == "qwen3_5" else 1e-6
        )

"""Kept tokens: shares that add up to what is stored, strings found, pages that are harmless."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import kvsieve
from kvsieve.errors import CacheStateError, InputError
from kvsieve.hf.kept_tokens.pieces import text_pieces
from small import plan_of, stored
from tiny import tiny_model, tiny_prompt
from tiny_models import build
from toy_words import word_tokenizer

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 3, "min_new_tokens": 3}
N, PADDING = 60, 9


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    ids = tiny_prompt(2, N, seed=0, low=3, high=100)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


def generated(model, prompt, name, **given):
    with kvsieve.attach(model, plan_of(name, model, **given), tokenizer=word_tokenizer()) as sieve:
        return sieve.generate(*prompt, **GREEDY)


@pytest.mark.parametrize("name", ["full", "adakv", "fastkv", "gemfilter", "pyramidinfer", "finch"])
def test_shares_add_up_to_what_is_stored(model, prompt, name):
    result = generated(model, prompt, name)
    for row, pad in enumerate((0, PADDING)):
        kept, held = result.kept_in(row), stored(result.cache, (0, PADDING))[row]
        assert len(kept) == N + 2 - pad and kept.prompt_end == N - pad
        assert kept.tokens.tolist() == result.sequences[row, pad : N + 2].tolist()
        for layer, heads in zip(kept.layers, held, strict=True):
            wanted = torch.tensor([sum(token in head for head in heads) for token in range(len(kept))]) / len(heads)
            assert torch.equal(layer.stored, wanted) and layer.entries == tuple(map(len, heads))
        heads = sum(layer.heads for layer in kept.layers)
        entries = sum(sum(layer.entries) for layer in kept.layers)
        assert float(kept.share.sum()) * heads == pytest.approx(entries)
        # What never came to a layer is not there.
        assert all(layer.reached is None or not layer.stored[~layer.reached].any() for layer in kept.layers)
    kept, stats = result.kept, result.stats
    assert result.kept is kept
    for layer, entries in zip(kept.layers, stats.kv_entries, strict=True):
        mean = float(layer.stored[:N].sum())
        assert entries - 1 < mean <= entries
    deep = N if kept.deep is None else int(kept.deep[:N].sum())
    assert deep == stats.deep_tokens


def test_what_a_view_leaves_out_is_stored_and_not_read(model, prompt):
    result = generated(model, prompt, "perturn")
    kept, budget = result.kept, result.cache.turn.record.raised_to
    assert kept.is_view and bool((kept.stored_share == 1).all())
    assert [float(layer.read[:N].sum()) for layer in kept.layers] == [budget] * 4
    unread = int((kept.share == 0).nonzero()[0])
    assert "not read" in kept.at(unread, unread + 1).states and "evicted" not in str(kept.at(0, N))
    assert "read in no layer" in str(kept) and "of the answer's reading" in repr(kept)


def test_positions_run_on_over_turns_and_where_tokens_were_dropped_is_saved(model, prompt, tmp_path):
    ids, plan = prompt[0][:1], plan_of("fastkv", model)
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids, **GREEDY)
        before = first.kept
        whole = torch.cat([first.sequences, ids[:, :30]], 1)
        second = sieve.generate(whole, cache=first.cache, **GREEDY)
        kept = second.kept
        assert [part[0] for part in kept.parts] == ["earlier turns", "prompt", "answer"]
        assert (kept.prompt_start, kept.prompt_end) == (N + 2, N + 33)
        # What was dropped on its way stays so, and each turn has its own.
        assert torch.equal(kept.deep[:N], before.deep[:N]) and not bool(kept.deep[N + 2 :].all())
        with pytest.raises(CacheStateError, match="gone on since this answer"):
            first.kept_in(0)
        sieve.save(second.cache, tmp_path / "c")
        again = sieve.kept(sieve.load(tmp_path / "c").cache, second.sequences)
        assert torch.equal(again.deep, kept.deep) and torch.equal(again.share, kept.share)
        with pytest.raises(InputError, match="expected 0 to 0"):
            sieve.kept(second.cache, second.sequences, row=1)
        with pytest.raises(InputError, match="pass the whole conversation"):
            sieve.kept(second.cache, ids)
        with pytest.raises(CacheStateError, match="read nothing yet"):
            sieve.kept(sieve.new_cache(), ids)
        with pytest.raises(CacheStateError, match="are beams"):
            _ = sieve.generate(ids, num_beams=2, **GREEDY).kept


@pytest.mark.parametrize(("family", "said"), [("gemma3", "sliding window of 16"), ("deepseek_v3", "latent attention")])
def test_layers_of_other_kinds(prompt, family, said):
    model = build(family)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=20, window=4, paper=True)) as sieve:
        result = sieve.generate(prompt[0][:1], **GREEDY)
    kept = result.kept
    assert [layer.index for layer in kept.counted] == result.stats.growing_layers
    assert {len(set(layer.entries)) for layer in kept.counted} == {1} and kept.counted[0].entries[0] == 22
    assert said in {layer.kind for layer in kept.layers}
    windows = [layer for layer in kept.layers if not layer.counts]
    # A window drops what it no longer sees a few tokens at a time.
    assert all(not layer.stored[:-20].any() and bool(layer.stored[-15:].all()) for layer in windows)
    assert bool(kept.notes) == bool(windows) and said in result.cache._repr_html_() + said


def byte_tokenizer():
    """Every byte is a token, and so is [END]."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({sign: at for at, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[END]")


def test_pieces_end_between_characters():
    tokenizer = byte_tokenizer()
    text = "aé漢 😀\n <b>\t\ufffd"
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id, *tokenizer("ü")["input_ids"][:1]]
    pieces = text_pieces(tokenizer, ids)
    assert [token for piece in pieces for token in range(piece.start, piece.end)] == list(range(len(ids)))
    assert "".join(piece.text for piece in pieces) == f"{text}[END]\ufffd"
    assert [(piece.end - piece.start, piece.text) for piece in pieces[:5]] == [
        (1, "a"), (2, "é"), (3, "漢"), (1, " "), (4, "😀")]  # fmt: skip
    assert [piece.text for piece in pieces if piece.control] == ["[END]"]


def test_a_string_is_found_and_its_loss_told(model, prompt):
    result = generated(model, prompt, "fastkv")
    kept, words = result.kept, word_tokenizer().convert_ids_to_tokens(result.sequences[0].tolist())
    lost = int((~kept.deep).nonzero()[0])
    found = kept.of(" ".join(words[lost : lost + 2]))
    one = next(each for each in found if each.start == lost)
    assert (one.end, one.part) == (lost + 2, "prompt")
    wanted = [float(layer.stored[lost : lost + 2].mean()) for layer in kept.layers]
    assert one.stored == one.read == pytest.approx(wanted)
    alone = kept.at(lost, lost + 1)
    assert alone.states[-1] == "never reached" and alone.reached == (1.0, 1.0, 0.0, 0.0)
    assert alone.where.endswith("2–3 never reached") and str(alone).startswith(f"token {lost} (prompt): ")
    assert kept.at(N - 1, N).where == "layers 0–3 whole" and kept.of("w1 nowhere") == []
    assert "·" in str(kept) and len(str(kept).splitlines()[1]) <= 80 and "\n" not in repr(kept)
    for text, told in (("", "looks for a string"), (3, "kept.at")):
        with pytest.raises(InputError, match=told):
            kept.of(text)
    with pytest.raises(InputError, match="needs the tokenizer"):
        kept.with_tokenizer(None).of("w1")
    with pytest.raises(InputError, match="expected 0 <= start"):
        kept.at(5, 5)


class Page(HTMLParser):
    """Elements, the text of tokens, and the data of a page."""

    def __init__(self, html):
        super().__init__()
        self.names, self.links, self.text, self.data, self.inside = [], [], "", "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names.append(tag)
        self.inside = "data" if given.get("id") == "data" else "token" if tag == "i" else ""
        self.links += [given[name] for name in ("src", "href") if name in given]

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, text):
        self.text += text if self.inside == "token" else ""
        self.data += text if self.inside == "data" else ""


def test_the_page_is_whole_and_harmless():
    text = "x <script>alert(1)</script> </div> & \n漢字 7294163"
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = build("llama", vocab_size=300)
    with kvsieve.attach(model, plan_of("fastkv", model), tokenizer=tokenizer) as sieve:
        kept = sieve.kept(sieve.prefill(ids), ids)
    page = Page(kept.to_html('"><script>'))
    assert page.text.endswith(text) and page.names.count("script") == 2
    # Nothing is fetched: links lead to the page's own sections.
    assert all(link.startswith(("#", "data:,")) for link in page.links)
    data = json.loads(page.data)
    shares = torch.frombuffer(bytearray(base64.b64decode(data["shares"])), dtype=torch.uint8).view(4, -1)
    for row, layer in zip(shares, kept.layers, strict=True):
        came = torch.ones(len(kept), dtype=torch.bool) if layer.reached is None else layer.reached
        assert torch.equal(row == 255, ~came) and torch.allclose(row[came] / 200, layer.stored[came])
    found = kept.of("7294163")
    assert len(found) == 1 and found[0].end == len(kept) and found[0].end - found[0].start == 7
    shown = kept._repr_html_()
    assert "<script" not in shown and "&lt;" in shown


def test_a_map_wider_than_the_text_has_no_empty_columns(model, prompt):
    ids = prompt[0][:1, :7]
    with kvsieve.attach(model, plan_of("full", model)) as sieve:
        kept = sieve.kept(sieve.prefill(ids), ids)
    assert torch.equal(kept.map(20), torch.ones(len(kept.layers), 20))
    assert torch.equal(kept.map(7), torch.ones(len(kept.layers), 7))
    halves = generated(model, prompt, "streamingllm", budget=12).kept
    wide = halves.map(2 * len(halves))
    assert torch.equal(wide[:, ::2], halves.map(len(halves))) and torch.equal(wide[:, ::2], wide[:, 1::2])
    assert "|" + "█" * 7 + "|" in str(kept), str(kept)

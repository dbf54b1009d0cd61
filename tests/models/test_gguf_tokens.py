"""What a GGUF file's metadata says: tokenizer, end tokens, settings of the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvsieve
from kvsieve.errors import KvsieveWarning
from kvsieve.models import ModelLoadError
from kvsieve.models.gguf.config import make_config, read_settings
from kvsieve.models.gguf.file import GgufFile
from kvsieve.models.gguf.splitting import SPLITTINGS
from kvsieve.models.gguf.tokenizer import generation_of, tokenizer_of
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))] + [
    chr(256 + n) for n in range(68)
]
# The first id after those of byte_words().
AFTER = len(BYTES) + 1
SHAPE = {
    **{"context_length": 4096, "embedding_length": 64, "block_count": 4, "feed_forward_length": 128},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5},
}


@pytest.fixture
def write(tmp_path):
    def written(keys: dict[str, Any], tensors: dict[str, Any] | None = None, arch: str = "llama") -> GgufFile:
        path = Path(tmp_path, f"{len(list(tmp_path.iterdir()))}.gguf")
        writer = gguf.GGUFWriter(path, arch)
        for key, value in keys.items():
            _ADDED[type(value)](writer, key, value)
        # Of all sizes that the tests' keys have.
        sizes = {"token_embd.weight": np.zeros((8, 256)), **{f"blk.{n}.attn_norm.weight": [0.0] for n in range(46)}}
        for name, numbers in {**sizes, **(tensors or {})}.items():
            writer.add_tensor(name, np.asarray(numbers, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufFile(path)

    return written


_ADDED: dict[type, Any] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def vocabulary(words: dict[str, int], kind: str = "gpt2", merges: list[str] | None = None, **keys: Any):
    """The keys of a tokenizer. words: types of tokens by word; keys: more of tokenizer.ggml."""
    found = {"model": kind, "tokens": list(words), "token_type": list(words.values()), **keys}
    if kind == "gpt2":
        found = {"pre": "qwen2", "merges": merges or ["T h"], **found}
    return {f"tokenizer.{name}" if "chat_template" in name else f"tokenizer.ggml.{name}": found[name] for name in found}


def byte_words(*words: str, **kinds: int) -> dict[str, int]:
    return {**dict.fromkeys([*BYTES, "Th"], NORMAL), **dict.fromkeys(words, NORMAL), **kinds}


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


TEXT = "They're 12345 defABC!!\n  x"
SPLITS = {
    "gpt-2": "They 're Ġ12345 ĠdefABC !! ĊĠ Ġx",
    "smollm": "They 're Ġ 1 2 3 4 5 ĠdefABC !! ĊĠ Ġx",
    "llama-bpe": "They 're Ġ 123 45 ĠdefABC !!Ċ Ġ Ġx",
    "qwen2": "They 're Ġ 1 2 3 4 5 ĠdefABC !!Ċ Ġ Ġx",
    "stablelm2": "They 're Ġ 1 2 3 4 5 ĠdefABC !!Ċ Ġ Ġx",
    "tekken": "They 're Ġ 1 2 3 4 5 Ġdef ABC !!Ċ Ġ Ġx",
    "gpt-4o": "They're Ġ 123 45 Ġdef ABC !!Ċ Ġ Ġx",
    "falcon": "They ' re Ġ 123 45 ĠdefABC !! ĊĠ Ġx",
    "deepseek-llm": "They ' re Ġ 1 2 3 4 5 ĠdefABC !! Ċ Ġ Ġx",
    "deepseek-coder": "They ' re Ġ 1 2 3 4 5 ĠdefABC !! Ċ Ġ Ġx",
    "deepseek-v3": "They 're Ġ 123 45 ĠdefABC !!Ċ Ġ Ġx",
    "bloom": "They're Ġ12345 ĠdefABC !!ĊĠ Ġx",
    "viking": "They're Ġ 1 2 3 4 5 ĠdefABC !!ĊĠ Ġx",
    "seed-coder": "They 're Ġ 1 2 3 4 5 ĠdefABC !! Ċ Ġ Ġx",
}


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_text_is_split_by_the_name_that_the_file_has(write, pre):
    tokenizer = tokenizer_of(write(vocabulary(byte_words(), pre=pre, add_bos_token=False)))
    split = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    if pre in SPLITS:
        assert split == SPLITS[pre].split(" ")
    text = "na\u00efve \u4f60\u597d 3\u00bd, it's\r\n\t\U0001f642\U0001f44d\U0001f3fd  end "
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_combining_pieces_follows_the_name_too(write):
    words = byte_words("They")
    taken, merged = (
        tokenizer_of(write(vocabulary(words, pre=pre, add_bos_token=False))) for pre in ("llama-bpe", "smaug-bpe")
    )
    assert pieces(taken, "They") == ["They"] and pieces(merged, "They") == ["Th", "e", "y"]
    composed, apart = (tokenizer_of(write(vocabulary(words, pre=pre))) for pre in ("qwen2", "stablelm2"))
    assert composed("e\u0301").input_ids == composed("\u00e9").input_ids == apart("\u00e9").input_ids
    assert apart("e\u0301").input_ids != apart("\u00e9").input_ids


def test_tokens_that_are_found_whole(write):
    kinds = {"<|a|>": CONTROL, "<think>": USER, "<\uff5cUser\uff5c>": CONTROL, "<|im_end|>": NORMAL, "two words": USER}
    file = write(vocabulary({**byte_words("<|eos|>"), **kinds}, eos_token_id=AFTER, padding_token_id=3))
    tokenizer = tokenizer_of(file)
    text = "<|a|> <think><\uff5cUser\uff5c><|im_end|>two words<|eos|>"
    assert pieces(tokenizer, text) == ["<|a|>", "Ġ", *list(kinds)[1:], "<|eos|>"]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == " <think>two words"
    # "$" is an ordinary word, so it is not taken for padding.
    assert BYTES[3] == "$" and tokenizer.pad_token == tokenizer.eos_token == "<|eos|>"
    assert pieces(tokenizer, "a$") == ["a", "$"] and tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({"pre": "qwen2"}, (0, 0)),
        ({"pre": "llama-bpe"}, (1, 0)),
        ({"pre": "llama-bpe", "add_bos_token": False}, (0, 0)),
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True}, (1, 1)),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(write, keys, ends):
    words = {**byte_words(), "<b>": CONTROL, "<e>": CONTROL}
    tokenizer = tokenizer_of(write(vocabulary(words, **keys, bos_token_id=AFTER, eos_token_id=AFTER + 1)))
    assert pieces(tokenizer, "x") == ["<b>"] * ends[0] + ["x"] + ["<e>"] * ends[1]
    assert tokenizer("x", add_special_tokens=False).input_ids == [BYTES.index("x")]


SCORED = {
    **{"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL},
    **{f"<0x{code:02X}>": BYTE for code in range(256)},
    **dict.fromkeys(
        (SPACE, "a", "b", "ab", "ba", SPACE + "a", SPACE * 2, "[", "INST", "I", "N", "S", "T", "]"), NORMAL
    ),
}


def scored(write, scores: dict[str, float], words: dict[str, int] = SCORED, arch: str = "llama", **keys: Any):
    listed = [scores.get(word, -100.0) for word in words]
    return tokenizer_of(write(vocabulary(words, "llama", scores=listed, **keys), arch=arch))


def test_pieces_with_scores_combine_best_first(write):
    assert pieces(scored(write, {"ab": -1.0, "ba": -2.0}), "aba") == ["<s>", SPACE, "ab", "a"]
    assert pieces(scored(write, {"ab": -2.0, "ba": -1.0}), "aba") == ["<s>", SPACE + "a", "ba"]
    # Gemma's are in order of their ids.
    assert pieces(scored(write, {"ba": -1.0}, arch="gemma2", add_space_prefix=False), "aba") == ["<s>", "ab", "a"]


def test_spaces_bytes_and_control_tokens_of_pieces_with_scores(write):
    tokenizer = scored(write, {SPACE + "a": -1.0, "ab": -3.0})
    # The ids of the first years' files, which have none of them.
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert pieces(tokenizer, "\u00e9") == ["<s>", SPACE, "<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, " a</s>a") == ["<s>", SPACE, SPACE + "a", "</s>", SPACE + "a"]
    assert "ab" in pieces(tokenizer, "bab")
    assert "ab" not in pieces(scored(write, {"ab": -3.0}, {**SCORED, "ab": UNUSED}), "bab")
    bare = scored(write, {}, add_space_prefix=False, add_bos_token=False)
    assert pieces(bare, "ab") == ["ab"] and pieces(bare, "[INST]") == ["[", "I", "N", "S", "T", "]"]
    mistral = scored(write, {}, {**SCORED, "[INST]": CONTROL})
    assert pieces(mistral, "a[INST]ab") == ["<s>", SPACE + "a", "[INST]", "ab"]
    for text in (" two  spaces ", "\u4f60\n\u00e9 ab"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text and bare.decode(bare(text).input_ids) == text


def test_gemma_runs_of_spaces_and_phi_3_tokens_that_absorb_spaces(write):
    words = {**{word: kind for word, kind in SCORED.items() if word != SPACE * 2}, "  ": USER, "\n\n": USER}
    gemma = scored(write, {}, words, arch="gemma3", add_space_prefix=False)
    assert (
        pieces(gemma, "a  b\n\n") == ["<s>", "a", SPACE * 2, "b", "\n\n"]
        and gemma.decode(gemma("a  b").input_ids[1:]) == "a  b"
    )
    phi = scored(write, {}, {**SCORED, "<|end|>": CONTROL, "<|endoftext|>": CONTROL}, arch="phi3")
    assert pieces(phi, "<|end|>  a")[1:] == ["<|end|>", SPACE + "a"]
    assert len(pieces(phi, "<|endoftext|>  a")) == 4


def test_chat_templates_are_the_files(write):
    keys = vocabulary({**byte_words(), "<e>": CONTROL}, eos_token_id=AFTER, chat_template="{{ 1 }}")
    file = write(keys)
    assert tokenizer_of(file).chat_template == "{{ 1 }}"
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    tokenizer = tokenizer_of(write({**keys, **named}))
    assert tokenizer.chat_template == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False) == "1"
    assert tokenizer_of(write(vocabulary(byte_words()))).chat_template is None


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({"eos": 0}, [0]),
        ({"eos": 0, "eot": 1, "eom": 2}, [0, 1, 2]),
        ({"eos": 0, "chat_template": "<|im_start|>"}, [0, 4]),
        ({"eos": 3, "chat_template": "{{ x }}<|im_end|>"}, [3, 4]),
        ({"eos": 4, "chat_template": "<|im_end|>"}, [4, 3]),
        ({"eos": 0, "chat_template": "<|end|>"}, [0, 5, 4]),
        ({}, None),
    ],
)
def test_answers_end_with_all_tokens_that_end_them(write, keys, ends):
    names = ["<e>", "<eot>", "<eom>", "<|im_end|>", "<|endoftext|>", "<|end|>"]
    words = {**byte_words(), **dict.fromkeys(names, CONTROL)}
    spelled = {f"{name}_token_id" if name != "chat_template" else name: value for name, value in keys.items()}
    ids = {name: AFTER + value if isinstance(value, int) else value for name, value in spelled.items()}
    file = write(vocabulary(words, **ids))
    config = generation_of(file, tokenizer_of(file))
    found = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    assert found == ([None] if ends is None else [AFTER + end for end in ends])
    if ends is not None:
        assert config.pad_token_id == AFTER + keys["eos"]


def test_a_part_of_an_answer_is_not_its_end(write):
    names = ("<|return|>", "<|call|>", "<|end|>")
    keys = {"eos_token_id": AFTER, "chat_template": "<|end|><|call|><|return|>"}
    file = write(vocabulary({**byte_words(), **dict.fromkeys(names, CONTROL)}, **keys))
    assert generation_of(file, tokenizer_of(file)).eos_token_id == [AFTER, AFTER + 1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "newest"}, "tokenizer.ggml.pre is 'newest', expected one of .*llama-bpe"),
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', expected one of gpt2, llama"),
        ({"tokens": ["a", "b", "a"]}, "vocabulary has 'a' twice"),
        ({"token_type": [1, 1]}, "token_type is .*, expected a list of 257 types"),
        ({"merges": ["a zz"]}, "its vocabulary has an error"),
        ({"kind": "llama"}, "scores is None, expected a list of 257 numbers"),
    ],
)
def test_what_is_not_known_is_refused(write, keys, message):
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_of(write(vocabulary(byte_words(), **keys)))


def test_what_is_left_out_is_told(write):
    words = {**byte_words(), "<e>": CONTROL}
    with pytest.warns(KvsieveWarning, match="padding_token_id is 999, expected a token below 258"):
        assert tokenizer_of(write(vocabulary(words, eos_token_id=AFTER, padding_token_id=999))).pad_token == "<e>"
    keys = vocabulary(words)
    del keys["tokenizer.ggml.pre"]
    with pytest.warns(KvsieveWarning, match=r"no tokenizer.ggml.pre"):
        tokenizer_of(write(keys))


def settings_of(write, arch: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> dict[str, Any]:
    named = {f"{arch}.{name}": value for name, value in {**SHAPE, "vocab_size": 8, **keys}.items()}
    file = write(named, tensors, arch)
    settings = read_settings(file)
    make_config(settings, file)
    return settings


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
FULL = "full_attention"
HONOURED = [
    ("llama", {"rope.freq_base": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("llama", {"attention.key_length": 32, "rope.dimension_count": 32}, {"head_dim": 32}),
    ("llama", {"rope.scaling.factor": 2.0}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope.scale_linear": 2.0}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope.scaling.type": "none"}, {"rope_parameters": {"rope_type": "default"}}),
    (
        "qwen2",
        {**YARN, "rope.scaling.attn_factor": 2.0, "rope.scaling.yarn_beta_fast": 16.0},
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
                **{"attention_factor": 2 * (0.1 * math.log(4) + 1), "beta_fast": 16.0},
            }
        },
    ),
    ("qwen3", {"attention.key_length": 32}, {"head_dim": 32}),
    ("qwen3", {}, {"head_dim": 16}),
    ("stablelm", {"rope.dimension_count": 4}, {"rope_parameters": {"partial_rotary_factor": 0.25}}),
    ("stablelm", {"rope.dimension_count": 16}, {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    ("starcoder2", {"rope.freq_base": 2e4}, {"rope_parameters": {"rope_theta": 2e4}}),
    ("nemotron", {"attention.layer_norm_epsilon": 0.5}, {"norm_eps": 0.5}),
    ("phi3", {"attention.sliding_window": 512}, {"sliding_window": 512}),
    ("phi3", {"attention.sliding_window": 1 << 18}, {"sliding_window": None}),
    ("gemma2", {"attn_logit_softcapping": 25.0, "final_logit_softcapping": 15.0}, {"attn_logit_softcapping": 25.0}),
    ("gemma2", {"attention.key_length": 32}, {"query_pre_attn_scalar": 32}),
    ("gemma2", {"attention.key_length": 32, "block_count": 46}, {"query_pre_attn_scalar": 16}),
    ("gemma2", {"attention.scale": 0.25}, {"query_pre_attn_scalar": 16}),
    (
        "gemma3",
        {"rope.freq_base": 1e6, "rope.scaling.factor": 8.0, "attention.key_length": 16},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    (
        "gemma3",
        {"attention.sliding_window_pattern": 2, "attention.key_length": 16},
        {"layer_types": ["sliding_attention", FULL] * 2},
    ),
    ("qwen3moe", {"expert_count": 4, "expert_feed_forward_length": 32}, {"moe_intermediate_size": 32}),
    ("gpt-oss", {**YARN, "rope.freq_base": 15e4}, {"rope_parameters": {"truncate": False, "rope_theta": 15e4}}),
    ("gpt2", {"context_length": 64}, {"n_positions": 64, "n_inner": 128}),
    ("falcon", {"attention.head_count_kv": 1, "attention.layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": 0.5}),
]


@pytest.mark.parametrize(("arch", "keys", "wanted"), HONOURED, ids=[f"{case[0]} {[*case[1]]}" for case in HONOURED])
def test_keys_that_change_numbers_are_honoured(write, arch, keys, wanted):
    settings = settings_of(write, arch, keys)
    for name, value in wanted.items():
        found = settings[name]
        if isinstance(value, dict) and FULL not in value:
            found = {key: found[key] for key in value}
        assert found == (pytest.approx(value) if name != "rope_parameters" or FULL not in value else value)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("llama", {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "type is 'longrope', expected none"),
        ("llama", {"rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0, expected 1 without YaRN"),
        ("llama", {"attention.key_length": 16, "rope.dimension_count": 8}, "dimension_count is 8, expected 16"),
        ("llama", {"attention.value_length": 8}, "value_length is 8, expected 16"),
        ("llama", {"attention.scale": 0.5}, "attention.scale is 0.5, expected 0.25"),
        ("llama", {"logit_scale": 2.0}, "llama.logit_scale is 2.0, expected 0 or 1"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected 0"),
        ("llama", {"expert_count": 8}, "expert_count is 8, expected no experts"),
        ("llama", {"rope.freq_base_swa": 1e3}, "freq_base_swa is 1000.0, expected 10000.0"),
        ("qwen2", {"attention.sliding_window": 512}, "sliding_window is 512, expected none"),
        ("qwen2", {"rope.dimension_sections": [2, 2, 2, 0]}, "dimension_sections is"),
        ("falcon", {"attention.head_count_kv": 2}, "head_count_kv is 2, expected 1"),
        ("llama", {**YARN, "rope.scaling.factor": "four"}, "a key of its architecture is no number that fits"),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused(write, arch, keys, message):
    with pytest.raises(ModelLoadError, match=message):
        settings_of(write, arch, keys)


def frequencies(**parameters: Any) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    return LlamaRotaryEmbedding(config).inv_freq


def test_divisors_of_frequencies_are_the_rule_of_llama_3(write):
    rule = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    divided = frequencies(rope_type="llama3", rope_theta=5e5, **rule)
    divisors = (frequencies(rope_type="default", rope_theta=5e5) / divided).tolist()
    keys = {"embedding_length": 256, "context_length": 1 << 17, "rope.freq_base": 5e5}
    found = settings_of(write, "llama", keys, {"rope_freqs.weight": divisors})["rope_parameters"]
    assert found == {"rope_type": "llama3", "rope_theta": 5e5, **rule}
    same = settings_of(write, "llama", keys, {"rope_freqs.weight": [1.0] * 32})["rope_parameters"]
    assert same["rope_type"] == "default"
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight has other numbers than the rule of Llama 3"):
        settings_of(write, "llama", keys, {"rope_freqs.weight": [*divisors[:-1], 31.0]})


def test_lists_of_factors_are_long_and_short_ones(write):
    lists = {"rope_factors_long.weight": [1.0, 4.0] * 4, "rope_factors_short.weight": [1.0, 2.0] * 4}
    keys = {"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.5, "rope.dimension_count": 16}
    settings = settings_of(write, "phi3", keys, lists)
    assert settings["original_max_position_embeddings"] == 1024
    found = settings["rope_parameters"]
    assert (found["long_factor"], found["short_factor"]) == tuple(lists.values())
    assert (found["rope_type"], found["attention_factor"], found["factor"]) == ("longrope", 1.5, 4.0)


@pytest.mark.parametrize("weights", [None, "expand"])
def test_a_loaded_model_has_all_of_it(tmp_path, monkeypatch, weights):
    toy = build("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = tmp_path / "toy.gguf"
    add_eos = gguf.GGUFWriter.add_eos_token_id

    def with_more(writer, number):
        add_eos(writer, number)
        writer.add_eot_token_id(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", with_more)
    write_gguf(toy, path)
    model, tokenizer = kvsieve.models.load(path, torch.float32, "cpu", weights)
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert tokenizer("ab").input_ids == kvsieve.models.load_tokenizer(str(path))("ab").input_ids == [1, 3 + 26 * 0 + 1]

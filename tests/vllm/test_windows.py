"""Contract with models of which some layers see a window: those are left alone."""

from __future__ import annotations

import pytest
import torch

from engines_of_vllm import answers, assert_alike, metric, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> str:
    """A random model of which every second layer sees 64 entries."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=32, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2, num_attention_heads=4, num_key_value_heads=2,
        query_pre_attn_scalar=32, max_position_embeddings=2048, initializer_range=0.12, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("windowed")
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_of_a_model_with_windows_the_other_layers_are_read_and_packed(engine, windowed):
    prompts = prompts_of([40, 300, 129, 512, 7])
    with engine(None, model=windowed) as llm:
        dense = answers(llm, prompts)
    with engine("quest:budget=64:page=32", model=windowed, self_test=True) as llm:
        assert_alike(answers(llm, prompts), dense)
    with engine("snapkv:budget=10%", model=windowed, self_test=True) as llm:
        assert_alike(answers(llm, prompts), dense)
    found = []
    for batched in (70, 1024):
        with engine("rocketkv:budget=128:window=16", model=windowed, max_num_batched_tokens=batched) as llm:
            found.append(answers(llm, prompts, 60))
            assert metric(llm, "kvsieve_blocks_freed") > 0
    assert_alike(*found)

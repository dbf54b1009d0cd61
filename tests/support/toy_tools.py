"""A tiny model that writes what it is told to: each token follows the one before it, whatever else was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from tiny_models import build

# Asks for a tool, and says what comes of it; one word each may follow another, so none is written twice.
CALL = ["Let_me_see.", "<tool_call>", '{"name":"add",', '"arguments":', '{"a":2,"b":3}', "}", "</tool_call>", "[EOS]"]
SAID = ["The", "sum", "is", "5.", "[STOP]"]
TURN, RESULT = "<assistant>", "<assistant:result>"
TEMPLATE = (
    "{% for tool in tools or [] %}<tool> {{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{% for call in m.tool_calls or [] %}<tool_call> {{ call.function | tojson }} </tool_call> {% endfor %}[EOS] "
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '" + RESULT + "' if messages[-1].role == 'tool' else '" + TURN + "' }} {% endif %}"
)


def tools_tokenizer(
    template: str = TEMPLATE, script: Sequence[str] = CALL, controls: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Words of the script and some more, 128 in all. controls: those that are control tokens."""
    words = ["[PAD]", "[BOS]", "[UNK]", "[EOS]", "[STOP]", TURN, RESULT, "<user>", "<tool>", "<system>", "add", "5"]
    words += [word for word in dict.fromkeys((*script, *SAID)) if word not in words]
    words += [f"w{number}" for number in range(128 - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, additional_special_tokens=["[STOP]", *controls], **special
    )


def scripted(tokenizer: Any, script: Sequence[str] = CALL) -> Any:
    """A tiny model that follows a script, asking for a tool, and says what came of it."""
    scripts = ([TURN, *script], [RESULT, *SAID])
    model = follows([tokenizer.convert_tokens_to_ids(script) for script in scripts])
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["[EOS]", "[STOP]"])
    return model


def follows(scripts: Iterable[Sequence[int]], vocabulary: int = 128) -> Any:
    """A tiny model with layers that add nothing, whose output layer holds scripts: token ids, each after the other."""
    model = build("llama", vocab_size=vocabulary)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        words = model.model.embed_tokens.weight
        words.copy_(torch.linalg.qr(torch.randn(vocabulary, vocabulary))[0][:, : words.shape[1]])
        model.model.norm.weight.fill_(1.0)
        out = torch.zeros_like(words)
        for script in scripts:
            for before, after in pairwise(script):
                out[after] += torch.nn.functional.normalize(words[before], dim=0)
        model.lm_head.weight = torch.nn.Parameter(out)
    model.generation_config.eos_token_id = None
    return model

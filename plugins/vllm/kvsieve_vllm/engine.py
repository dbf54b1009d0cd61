"""Engine options that are incompatible with plans, and those switched off with a warning."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any

from kvsieve.errors import UnsupportedOptionError
from kvsieve.planning.profiles import Fingerprint
from kvsieve_vllm.carried import check_carried
from kvsieve_vllm.names import ANY_VERSION
from kvsieve_vllm.options import EngineOptions
from kvsieve_vllm.reading import PageReading

# Versions of vLLM that the contract tests ran with.
TESTED = ("0.32.0",)
# vLLM passes prompt lengths to its attention backends if a model has a window of this kind; in the extended backends it
# has no other effect. So large a window hides nothing.
PROMPT_LENGTHS = 1 << 30
# Options and kinds of models that are incompatible with every plan.
REFUSED = {
    "speculative": "speculative decoding reads several tokens at once, some of which are taken back",
    "kv_transfer": "a KV connector brings in and takes away blocks that the plugin would not see",
    "context_parallel": "context parallelism: no process sees all of a request's entries",
    "latent": "latent attention, whose pages hold no keys",
    "no_decoder": "a model that is no decoder generating text",
    "second_runner": "vLLM's second model runner, which is not tested: set VLLM_USE_V2_MODEL_RUNNER=0",
    "microbatches": "batches of a step that overlap, which are not tested: leave --enable-dbo out",
    "bidirectional": "tokens that attend to later ones",
}


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine's configuration that may be incompatible with a plan.

    Attributes:
        version: of vLLM.
        device: "cpu", "cuda", "rocm" ...
        block_size: entries of a block.
        num_layers: decoder layers of the model.
        kv_cache_dtype: "auto", or that of a quantised cache.
        recurrent: some layers have recurrent states.
        prefix_caching: with prefix caching.
        refused: its keys of REFUSED.
    """

    version: str
    device: str
    block_size: int
    num_layers: int
    kv_cache_dtype: str = "auto"
    recurrent: bool = False
    prefix_caching: bool = False
    refused: frozenset[str] = frozenset()


def check_version(version: str) -> None:
    """Refuse an untested version of vLLM. Raises UnsupportedOptionError."""
    if version not in TESTED and os.environ.get(ANY_VERSION) != "1":
        raise UnsupportedOptionError(
            f"kvsieve's plugin is tested with vLLM {', '.join(TESTED)}, this is {version}: install vllm=={TESTED[-1]}, "
            f"or leave the plan out, or set {ANY_VERSION}=1 and run the contract tests in tests/vllm first"
        )


def check_engine(options: EngineOptions, facts: EngineFacts) -> None:
    """Refuse incompatible options.

    Raises:
        PlanError: the engine does not support the plan.
        UnsupportedOptionError: incompatible options of the engine, all of them named.
    """
    check_version(facts.version)
    plan = options.plan
    check_carried(plan)
    found = [reason for name, reason in REFUSED.items() if name in facts.refused]
    if facts.device not in ("cpu", "cuda"):
        found.append(f"attention on {facts.device}: vLLM's backends for it are not extended")
    if facts.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
        found.append(f"a cache in {facts.kv_cache_dtype}")
    if found:
        raise UnsupportedOptionError(
            f"kvsieve's plan {plan.name} does not go with this engine: {'; '.join(found)}. Leave the plan or the "
            "option out; docs/vllm.md tells what goes together"
        )
    for role in plan.roles:
        vars(plan)[role].check(facts.num_layers)
    # Any number of channels does: it decides nothing that is checked.
    reading = PageReading.of(options, facts.block_size, 64, facts.num_layers)
    if reading is not None:
        reading.check()


def needs_no_prefix_caching(options: EngineOptions, facts: EngineFacts) -> str | None:
    """Return the reason to switch prefix caching off; None if it may be on, or is off."""
    if facts.prefix_caching and options.plan.evict is not None:
        return "an evictor puts other entries into the blocks that a prompt begins with"
    return None


def settle(options: EngineOptions, hf_config: Any, tokenizer: str | None) -> EngineOptions:
    """Return options with the plan's model-dependent parts filled in: profile, depth, and the tokenizer's digits.

    Args:
        options: as given.
        hf_config: the model's configuration of transformers.
        tokenizer: its tokenizer's name or directory; None for none.
    """
    if options.settled:
        return options
    loaded = None
    if options.plan.unset is not None and tokenizer is not None:
        from transformers import AutoTokenizer

        # Without one, digits are taken to be tokens of their own, as everywhere in kvsieve.
        with contextlib.suppress(OSError, ValueError):
            loaded = AutoTokenizer.from_pretrained(tokenizer)
    return replace(options, plan=options.plan.for_model(Fingerprint.of_config(hf_config), loaded), settled=True)

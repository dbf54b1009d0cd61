"""Options of an engine that a plan does not go with, and those that are switched off for it, aloud."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import Any

from kvsieve.errors import UnsupportedOptionError
from kvsieve.profiles import Fingerprint
from kvsieve.vllm.carried import check_carried
from kvsieve.vllm.names import ANY_VERSION
from kvsieve.vllm.options import EngineOptions
from kvsieve.vllm.pages import PageReader, check_page

# Of vLLM, those that the contract tests have run with.
TESTED = ("0.32.0",)
# vLLM tells its attention backends the lengths of prompts where a model has a window of this kind; where they are
# extended, nothing else looks at it. So large a window would hide nothing.
PROMPT_LENGTHS = 1 << 30


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine's configuration that a plan may not go with.

    Attributes:
        version: of vLLM.
        device: "cpu", "cuda", "rocm" ...
        block_size: entries of a block.
        speculative: with speculative decoding.
        kv_transfer: with a KV connector.
        context_parallel: a request's context is divided among processes.
        kv_cache_dtype: "auto", or that of a quantised cache.
        latent: the model has latent attention.
        generates: it is a decoder that generates text.
        recurrent: some layers have recurrent states.
        prefix_caching: with prefix caching.
        second_runner: vLLM's second model runner is used.
        microbatches: a step is divided into batches that overlap.
        bidirectional: some tokens attend to later ones.
    """

    version: str
    device: str
    block_size: int
    speculative: bool = False
    kv_transfer: bool = False
    context_parallel: bool = False
    kv_cache_dtype: str = "auto"
    latent: bool = False
    generates: bool = True
    recurrent: bool = False
    prefix_caching: bool = False
    second_runner: bool = False
    microbatches: bool = False
    bidirectional: bool = False


def check_version(version: str) -> None:
    """Refuse a version of vLLM that was not tested. Raises UnsupportedOptionError."""
    if version not in TESTED and os.environ.get(ANY_VERSION) != "1":
        raise UnsupportedOptionError(
            f"kvsieve's plugin is tested with vLLM {', '.join(TESTED)}, this is {version}: install vllm=={TESTED[-1]}, "
            f"or leave the plan out, or set {ANY_VERSION}=1 and run the contract tests in tests/vllm first"
        )


def check_engine(options: EngineOptions, facts: EngineFacts) -> None:
    """Refuse what does not go together.

    Raises:
        PlanError: the engine cannot carry the plan.
        UnsupportedOptionError: options of the engine that do not go with it, all of them named.
    """
    check_version(facts.version)
    plan = options.plan
    check_carried(plan)
    reasons = [
        (facts.device not in ("cpu", "cuda"), f"attention on {facts.device}: vLLM's backends for it are not extended"),
        (facts.speculative, "speculative decoding reads several tokens at once, some of which are taken back"),
        (facts.kv_transfer, "a KV connector brings in and takes away blocks that the plugin would not see"),
        (facts.context_parallel, "context parallelism: no process sees all of a request's entries"),
        (facts.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"), f"a cache in {facts.kv_cache_dtype}"),
        (facts.latent, "latent attention, whose pages hold no keys"),
        (not facts.generates, "a model that is no decoder generating text"),
        (facts.second_runner, "vLLM's second model runner, which is not tested: set VLLM_USE_V2_MODEL_RUNNER=0"),
        (facts.microbatches, "batches of a step that overlap, which are not tested: leave --enable-dbo out"),
        (facts.bidirectional, "tokens that attend to later ones"),
    ]
    found = [reason for is_so, reason in reasons if is_so]
    if found:
        raise UnsupportedOptionError(
            f"kvsieve's plan {plan.name} does not go with this engine: {'; '.join(found)}. Leave the plan or the "
            "option out; docs/vllm.md tells what goes together"
        )
    if isinstance(plan.read, PageReader):
        check_page(plan.read, facts.block_size)


def needs_no_prefix_caching(options: EngineOptions, facts: EngineFacts) -> str | None:
    """Tell why prefix caching must be off; None where it may be on, or is off."""
    if facts.prefix_caching and options.plan.evict is not None:
        return "an evictor puts other entries into the blocks that a prompt begins with"
    return None


def settle(options: EngineOptions, hf_config: Any, tokenizer: str | None) -> EngineOptions:
    """Fill in what the plan leaves to the model: parameters of its profile, its depth, its tokenizer's digits.

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

"""Entry point called by every process of vLLM; nothing changes unless a plan is configured.

Two functions of vLLM's platform are wrapped. The first checks a finished configuration: options are read there, refused
or completed for the model, and passed to the engine's other processes within the configuration. The second returns the
attention backend of a layer: with a plan, one of the plugin's.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvsieve_vllm.names import KEY, asked_for

if TYPE_CHECKING:
    from kvsieve_vllm.engine import EngineFacts

logger = logging.getLogger("vllm.kvsieve")
# vLLM's extended backends by name, and their extensions.
BACKENDS = {
    "CPU_ATTN": "kvsieve_vllm.cpu_backend.SieveCPUBackend",
    "TRITON_ATTN": "kvsieve_vllm.triton_backend.SieveTritonBackend",
}
# Entries of a block by default. vLLM has 128 on CPUs, coarse for pages, and 16 on GPUs, many to choose from.
BLOCK_SIZE = 32


@functools.cache
def register() -> None:
    """Wrap the two functions; the entry point of ``vllm.general_plugins``."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    update = platform.check_and_update_config.__func__
    backend = platform.get_attn_backend_cls.__func__

    @classmethod  # type: ignore[misc]
    @functools.wraps(update)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        update(cls, vllm_config)
        configure(vllm_config)

    @classmethod  # type: ignore[misc]
    @functools.wraps(backend)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        from vllm.config import get_current_vllm_config

        plan = asked_for(get_current_vllm_config().additional_config)
        if plan is not None and selected_backend is None and cls.device_type == "cuda":
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            # vLLM prefers others there, and reports if this one does not support the model.
            selected_backend = AttentionBackendEnum.TRITON_ATTN
        found: str = backend(cls, selected_backend, *args, **kwargs)
        return found if plan is None else _ours(found)

    platform.check_and_update_config = check_and_update_config
    platform.get_attn_backend_cls = get_attn_backend_cls


def configure(vllm_config: Any) -> None:
    """Read the options of a complete configuration, refuse unsupported ones, and pass on the rest.

    Raises:
        PlanError: the plan is invalid, or the engine does not support it.
        UnsupportedOptionError: an option of the engine is incompatible with it.
    """
    from vllm.v1.attention.selector import _cached_get_attn_backend

    # It may have cached the backend of an earlier engine of this process.
    _cached_get_attn_backend.cache_clear()
    if asked_for(vllm_config.additional_config) is None or vllm_config.model_config is None:
        return
    from kvsieve_vllm.engine import PROMPT_LENGTHS, check_engine, needs_no_prefix_caching, settle
    from kvsieve_vllm.metrics import install
    from kvsieve_vllm.options import EngineOptions

    options = EngineOptions.given(vllm_config.additional_config)
    assert options is not None
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    if not cache.user_specified_block_size:
        cache.block_size = BLOCK_SIZE
        # On GPUs vLLM chooses again later, unless a user has.
        cache.user_specified_block_size = vllm_config.device_config.device_type == "cuda"
    facts = facts_of(vllm_config)
    check_engine(options, facts)
    options = settle(options, model.hf_config, model.tokenizer)
    why = needs_no_prefix_caching(options, facts)
    if why is not None:
        logger.warning("kvsieve: prefix caching is switched off, because %s", why)
        cache.enable_prefix_caching = False
        if facts.recurrent:
            # vLLM's own choice without prefix caching: a request keeps one state per recurrent layer, the latest.
            cache.mamba_cache_mode = "none"
            cache.mamba_block_size = model.max_model_len
    settle_graphs(vllm_config.compilation_config, options.plan.evict is not None)
    install()
    model.model_arch_config.rswa_window = PROMPT_LENGTHS
    if not isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {}
    vllm_config.additional_config[KEY] = options.handed_on()
    logger.info("kvsieve: %r; pages have %d entries (--block-size)", options.plan, facts.block_size)


def settle_graphs(compilation_config: Any, evicts: bool) -> None:
    """Exclude attention from CUDA graphs under an evictor, with a warning; the rest may stay in them."""
    from vllm.config import CUDAGraphMode

    mode = compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return
    if not evicts:
        # Bounds of pages must exist before, and kernels be loaded.
        compilation_config.cudagraph_num_of_warmups = max(compilation_config.cudagraph_num_of_warmups, 1)
        return
    left = CUDAGraphMode.PIECEWISE if mode.has_piecewise_cudagraphs() else CUDAGraphMode.NONE
    logger.warning(
        "kvsieve: CUDA graphs are %s instead of %s, because behind what step something is evicted is not known to them",
        left.name,
        mode.name,
    )
    compilation_config.cudagraph_mode = left


def facts_of(vllm_config: Any) -> EngineFacts:
    """Return the facts of a configuration."""
    import vllm
    from vllm.platforms import current_platform

    from kvsieve_vllm.engine import EngineFacts

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    refused = {
        "speculative": vllm_config.speculative_config is not None,
        "kv_transfer": vllm_config.kv_transfer_config is not None,
        "context_parallel": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "latent": model.use_mla,
        "no_decoder": model.runner_type != "generate" or model.is_encoder_decoder or model.is_attention_free,
        "second_runner": vllm_config.use_v2_model_runner,
        "microbatches": parallel.use_ubatching,
        "bidirectional": model.is_mm_prefix_lm or vllm_config.attention_config.use_non_causal,
    }
    return EngineFacts(
        version=vllm.__version__,
        device="rocm" if current_platform.is_rocm() else vllm_config.device_config.device_type,
        block_size=cache.block_size,
        num_layers=model.get_total_num_hidden_layers(),
        kv_cache_dtype=cache.cache_dtype,
        recurrent=model.is_hybrid,
        prefix_caching=bool(cache.enable_prefix_caching),
        refused=frozenset(name for name, is_so in refused.items() if is_so),
    )


def _ours(found: str) -> str:
    """Return the path of the backend that extends one of vLLM's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name, path in BACKENDS.items():
        if found == AttentionBackendEnum[name].get_path():
            return path
    from kvsieve.errors import UnsupportedOptionError

    raise UnsupportedOptionError(
        f"kvsieve extends vLLM's backends {' and '.join(BACKENDS)}, and a layer of this model has {found}; leave the "
        "plan or --attention-backend out"
    )

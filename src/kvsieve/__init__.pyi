"""Types of kvsieve's public names, made by `python tests/support/stubs.py`; do not edit."""

from typing import Any, Literal, overload

from kvsieve import methods as methods
from kvsieve import models as models
from kvsieve.errors import KvsieveError as KvsieveError
from kvsieve.errors import KvsieveWarning as KvsieveWarning
from kvsieve.hf.attach import Sieve as Sieve
from kvsieve.hf.attach import attach as attach
from kvsieve.hf.cache.cache import SieveCache as SieveCache
from kvsieve.lab.eval.evaluator import Evaluator as Evaluator
from kvsieve.planning.budget import Budget as Budget
from kvsieve.planning.grammars import Grammar as Grammar
from kvsieve.planning.plans import Plan as Plan
from kvsieve.planning.profiles import Profile
from kvsieve.planning.registry import list_methods as list_methods
from kvsieve.planning.registry import method_info as method_info
from kvsieve.planning.registry import register_method as register_method
from kvsieve.planning.roles import Codec, SparsePrefill

__version__: str
__all__: list[str]

@overload
def plan(
    method: Literal["full"],
    *,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["a-shape"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    skip_layers: int | tuple[int, ...] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["adakv"],
    *,
    budget: Budget | str | float = ...,
    alpha: float = ...,
    normalize: bool = ...,
    rule: Literal["paper", "kvpress"] = ...,
    pyramid: bool = ...,
    beta: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["asl"],
    *,
    budget: Budget | str | float = ...,
    tau: float = ...,
    observed: int = ...,
    first: int | None = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    full_before: bool = ...,
    two_pass: bool = ...,
    rule: Literal["asl", "gemfilter"] = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["cake"],
    *,
    budget: Budget | str | float = ...,
    tau1: float = ...,
    tau2: float = ...,
    gamma: float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["chunkkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    chunk_length: int = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["claa"],
    *,
    budget: Budget | str | float = ...,
    tsp_layer: int | None = ...,
    tsp_rate: Budget | str | int | float = ...,
    joined: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["criticalkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["duoattention"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    sinks: int = ...,
    recent: int = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["dynamickv"],
    *,
    budget: Budget | str | float = ...,
    most: float = ...,
    interval: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["exacttopk"],
    *,
    budget: Budget | str | float = ...,
    per_group: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["expectedattention"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    n_future: int = ...,
    use_covariance: bool = ...,
    use_vnorm: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["fastkv"],
    *,
    budget: Budget | str | float = ...,
    tsp_layer: int | None = ...,
    tsp_rate: Budget | str | int | float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["finch"],
    *,
    budget: Budget | str | float = ...,
    question_tokens: int | None = ...,
    chunk_length: int = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["flashprefill"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    alpha: float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["flexprefill"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    gamma: float = ...,
    divergence: float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["fp8"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["gemfilter"],
    *,
    budget: Budget | str | float = ...,
    layer: int | None = ...,
    kernel: Any = ...,
    keep_last: int = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["h2o"],
    *,
    budget: Budget | str | float = ...,
    recent: float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["hqq"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    group: int = ...,
    bits: Literal[2, 3, 4, 8] = ...,
    rounds: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["hsa"],
    *,
    budget: Budget | str | float = ...,
    skip_layers: Any = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["int8"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["k8v4"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    group: int = ...,
    key_bits: Literal[2, 3, 4, 8] = ...,
    value_bits: Literal[2, 3, 4, 8] = ...,
    rotate_values: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["keydiff"],
    *,
    budget: Budget | str | float = ...,
    chunks: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["kivi"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    group: int = ...,
    bits: Literal[2, 3, 4, 8] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["knorm"],
    *,
    budget: Budget | str | float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["kvzip"],
    *,
    budget: Budget | str | float = ...,
    prefix: int = ...,
    chunk_length: int = ...,
    uniform: bool = ...,
    repeat_ids: tuple[int, ...] | None = ...,
    go_on_ids: tuple[int, ...] | None = ...,
    answer_ids: tuple[int, ...] | None = ...,
    skip_layers: int | tuple[int, ...] = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["lagkv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    lag: int = ...,
    variant: Literal["lag", "local", "l2"] = ...,
    chunks: bool = ...,
    decode: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["lookahead"],
    *,
    budget: Budget | str | float = ...,
    lookahead: int = ...,
    draft: Budget | str | int | float | None = ...,
    local: bool = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["minference"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    vertical: float = ...,
    slash: float = ...,
    last: int = ...,
    skip_layers: int | tuple[int, ...] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["mixed"],
    *,
    budget: Budget | str | float = ...,
    bits: Literal[2, 3, 4] = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["outlier"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    group: int = ...,
    bits: Literal[2, 3, 4, 8] = ...,
    share: float = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["per-layer"],
    *,
    shares: tuple[float, ...] | str = ...,
    budget: Budget | str | float = ...,
    base: str = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["perturn"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["pyramidinfer"],
    *,
    rate: float = ...,
    recent: float = ...,
    strategy: Literal["cosine", "linear"] = ...,
    interval: int = ...,
    min_context: int = ...,
    sinks: int = ...,
    distance_weight: float = ...,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: Any = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["pyramidkv"],
    *,
    budget: Budget | str | float = ...,
    beta: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["qfilters"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    recent: int = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["quest"],
    *,
    budget: Budget | str | float = ...,
    page: int | None = ...,
    per_query_head: bool = ...,
    means: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["rocketkv"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: int = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["rocketkv-mt"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: int = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["rotated"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    bits: Literal[2, 3, 4] = ...,
    key_bits: Any = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["sagekv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    recent: float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["snapkv"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    per_query_head: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["sparq"],
    *,
    budget: Budget | str | float = ...,
    mean_value: bool = ...,
    per_query_head: bool = ...,
    skip_layers: int | tuple[int, ...] = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["specprefill"],
    *,
    draft: Any = ...,
    keep: Budget | str | int | float = ...,
    lookahead: int = ...,
    smooth: int = ...,
    chunk_length: int = ...,
    keep_last: int = ...,
    budget: Budget | str | float = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["squeezeattention"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    p: float = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["staged"],
    *,
    budget: Budget | str | float = ...,
    tsp_layer: int | None = ...,
    tsp_rate: Budget | str | int | float = ...,
    early_layer: int | None = ...,
    early_rate: Budget | str | int | float = ...,
    joined: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    skip_layers: Any = ...,
    every: int | None = ...,
    floor: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["streamingllm"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["tova"],
    *,
    budget: Budget | str | float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    every: int | None = ...,
    floor: int = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["xattention"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    threshold: float = ...,
    stride: int = ...,
    skip_layers: int | tuple[int, ...] = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(
    method: Literal["zigzagkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    target: float = ...,
    layer_floor: float = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    every: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    codec: Codec | str | None = ...,
    rest: Codec | str | None = ...,
    prefill: SparsePrefill | str | None = ...,
) -> Plan: ...
@overload
def plan(method: str, **parameters: Any) -> Plan: ...

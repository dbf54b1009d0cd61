"""Types of kvsieve's public names, made by `python tests/support/stubs.py`; do not edit."""

from typing import Any, Literal, TypedDict, Unpack, overload

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

class _Parts(TypedDict, total=False):
    codec: Codec | str | None
    rest: Codec | str | None
    prefill: SparsePrefill | str | None
    merge: str | None

class _Acts(_Parts, total=False):
    skip_layers: int | tuple[int, ...] | str
    floor: int

class _Evicts(_Acts, total=False):
    every: int | None

class _Ranks(_Evicts, total=False):
    answer: Budget | str | float | None
    grows: bool

class _Reads(_Acts, total=False):
    newest: bool
    sparse_questions: bool
    share: int | tuple[int, ...]

@overload
def plan(
    method: Literal["full"],
    **shared: Unpack[_Parts],
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
    **shared: Unpack[_Parts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["attentionmatching"],
    *,
    repeat_ids: tuple[int, ...] | None = ...,
    answer_ids: tuple[int, ...] | None = ...,
    budget: Budget | str | float = ...,
    biases: bool = ...,
    values: bool = ...,
    on_policy: bool = ...,
    queries: int = ...,
    ridge: float = ...,
    **shared: Unpack[_Acts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["cam"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    span: int = ...,
    seed: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["capkv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    n_future: int = ...,
    tau: float = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["chunkkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    chunk_length: int = ...,
    share: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["clusterkv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    per_cluster: int = ...,
    chunk_length: int = ...,
    iterations: int = ...,
    per_query_head: bool = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["compactattention"],
    *,
    base: str = ...,
    chunk_length: int = ...,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    local: int = ...,
    full: int = ...,
    skip_layers: int | tuple[int, ...] | str = ...,
    paper: bool = ...,
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["compactor"],
    *,
    budget: Budget | str | float = ...,
    parts: Literal["both", "leverage", "attention"] = ...,
    blending: float | None = ...,
    sketch: int = ...,
    chunk_length: int = ...,
    sinks: int = ...,
    recent: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["compresskv"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    voters: int = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["corm"],
    *,
    budget: Budget | str | float = ...,
    queries: int = ...,
    recent: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["criticaladakv"],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["criticalkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["critiprefill"],
    *,
    block: int = ...,
    queries: int = ...,
    least: int = ...,
    sinks: int = ...,
    local: int = ...,
    full: int = ...,
    critical: int = ...,
    fusion: float = ...,
    skip_layers: int | tuple[int, ...] = ...,
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["curdkv"],
    *,
    budget: Budget | str | float = ...,
    kind: Literal["product", "mean", "key", "value"] = ...,
    local: int = ...,
    projection: int = ...,
    sinks: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["d2o"],
    *,
    budget: Budget | str | float = ...,
    recent: float = ...,
    sinks: int = ...,
    alpha: float = ...,
    beta: float = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["defensivekv"],
    *,
    budget: Budget | str | float = ...,
    across_layers: bool = ...,
    mass: float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["duoattention"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    sinks: int = ...,
    recent: int = ...,
    compensate: bool = ...,
    **shared: Unpack[_Ranks],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["entropychunkkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    chunk_length: int = ...,
    spiky_length: int = ...,
    share: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["exacttopk"],
    *,
    budget: Budget | str | float = ...,
    per_group: bool = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
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
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["fastgen"],
    *,
    budget: Budget | str | float = ...,
    recovery: float = ...,
    window: int = ...,
    special_ids: tuple[int, ...] | None = ...,
    punctuation_ids: tuple[int, ...] | None = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["finch"],
    *,
    budget: Budget | str | float = ...,
    question_tokens: int | None = ...,
    chunk_length: int = ...,
    floor: int = ...,
    **shared: Unpack[_Parts],
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
    **shared: Unpack[_Parts],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["fp8"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    **shared: Unpack[_Parts],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["h2o"],
    *,
    budget: Budget | str | float = ...,
    recent: float = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["headkv"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    beta: float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    **shared: Unpack[_Evicts],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["hsa"],
    *,
    budget: Budget | str | float = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["infllm"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    local: int | None = ...,
    block: int = ...,
    representatives: int = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["int8"],
    *,
    block: int = ...,
    tail: int = ...,
    sinks: int = ...,
    **shared: Unpack[_Parts],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["kascade"],
    *,
    budget: Budget | str | float = ...,
    per_group: bool = ...,
    anchor_heads: tuple[tuple[float, ...], ...] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["keydiff"],
    *,
    budget: Budget | str | float = ...,
    chunks: bool = ...,
    **shared: Unpack[_Ranks],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["knorm"],
    *,
    budget: Budget | str | float = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["kvcompose"],
    *,
    budget: Budget | str | float = ...,
    chunk_length: int = ...,
    **shared: Unpack[_Acts],
) -> Plan: ...
@overload
def plan(
    method: Literal["kvcrush"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    representatives: float = ...,
    anchor: Literal["alternating", "random", "zeros", "ones"] = ...,
    seed: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["kvmerger"],
    *,
    budget: Budget | str | float = ...,
    recent: float = ...,
    heavy: float = ...,
    sinks: int = ...,
    threshold: float = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["kvsquared"],
    *,
    budget: Budget | str | float = ...,
    prefix: int = ...,
    chunk_length: int = ...,
    uniform: bool = ...,
    fed_share: float | None = ...,
    **shared: Unpack[_Acts],
) -> Plan: ...
@overload
def plan(
    method: Literal["kvzip"],
    *,
    repeat_ids: tuple[int, ...] | None = ...,
    answer_ids: tuple[int, ...] | None = ...,
    budget: Budget | str | float = ...,
    prefix: int = ...,
    chunk_length: int = ...,
    uniform: bool = ...,
    go_on_ids: tuple[int, ...] | None = ...,
    **shared: Unpack[_Acts],
) -> Plan: ...
@overload
def plan(
    method: Literal["lacache"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    span: int | None = ...,
    overlap: int = ...,
    **shared: Unpack[_Ranks],
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
    paper: bool = ...,
    **shared: Unpack[_Acts],
) -> Plan: ...
@overload
def plan(
    method: Literal["loki"],
    *,
    budget: Budget | str | float = ...,
    part: float | None = ...,
    per_query_head: bool = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["lukv"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["merge"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    rule: str = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
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
    **shared: Unpack[_Parts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["morphkv"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    fusion: Literal["sum", "max"] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["obcache"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    per_query_head: bool = ...,
    form: Literal["joint", "value", "key"] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["omnikv"],
    *,
    budget: Budget | str | float = ...,
    wait: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["per-layer"],
    *,
    shares: tuple[float, ...] | str = ...,
    budget: Budget | str | float = ...,
    base: str = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["perturn"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    paper: bool = ...,
    **shared: Unpack[_Acts],
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
    **shared: Unpack[_Parts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["qfilters"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    recent: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["quest"],
    *,
    budget: Budget | str | float = ...,
    page: int | None = ...,
    per_query_head: bool = ...,
    means: bool = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["random"],
    *,
    budget: Budget | str | float = ...,
    recent: int = ...,
    seed: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["rerotation"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    question_tokens: int = ...,
    chunk_length: int | None = ...,
    floor: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["rocketkv"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: int = ...,
    pooling: Literal["avg", "max"] = ...,
    newest: bool = ...,
    sparse_questions: bool = ...,
    share: int | tuple[int, ...] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["rocketkv-mt"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    kernel: int = ...,
    pooling: Literal["avg", "max"] = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
) -> Plan: ...
@overload
def plan(
    method: Literal["roco"],
    *,
    budget: Budget | str | float = ...,
    recent: float = ...,
    sinks: int = ...,
    newest: int = ...,
    **shared: Unpack[_Ranks],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["sagekv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    recent: float = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["scope"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    answer: Budget | str | int | float = ...,
    recent: int = ...,
    strategy: Literal["slide", "adaptive", "discontinuous"] = ...,
    interval: int = ...,
    floor: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["simlayerkv"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    threshold: float = ...,
    observed: int = ...,
    **shared: Unpack[_Ranks],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["sparq"],
    *,
    budget: Budget | str | float = ...,
    mean_value: bool = ...,
    per_query_head: bool = ...,
    paper: bool = ...,
    **shared: Unpack[_Reads],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["squeezeattention"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    p: float = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
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
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["streamingllm"],
    *,
    budget: Budget | str | float = ...,
    sinks: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["threshold"],
    *,
    threshold: float = ...,
    budget: Budget | str | float = ...,
    base: str = ...,
    recent: int = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["tova"],
    *,
    budget: Budget | str | float = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["triattention"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    n_future: int = ...,
    sinks: int = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["uncomp"],
    *,
    budget: Budget | str | float = ...,
    profile: Profile | str | None = ...,
    groups: int = ...,
    spread: float = ...,
    stages: tuple[int, ...] | str | None = ...,
    rate: Budget | str | int | float = ...,
    window: int = ...,
    kernel: Any = ...,
    pooling: Literal["avg", "max"] = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["vase"],
    *,
    budget: Budget | str | float = ...,
    window: int = ...,
    large: int = ...,
    seed: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Ranks],
) -> Plan: ...
@overload
def plan(
    method: Literal["windowkv"],
    *,
    budget: Budget | str | float = ...,
    length: int = ...,
    rule: Literal["average", "max"] = ...,
    share: int = ...,
    beta: int = ...,
    window: int = ...,
    profile: Profile | str | None = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
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
    **shared: Unpack[_Parts],
) -> Plan: ...
@overload
def plan(
    method: Literal["zeromerge"],
    *,
    budget: Budget | str | float = ...,
    tail: float = ...,
    residual: float = ...,
    decay: float = ...,
    sinks: int = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(
    method: Literal["zigzagkv"],
    *,
    budget: Budget | str | float = ...,
    base: str = ...,
    target: float = ...,
    layer_floor: float = ...,
    paper: bool = ...,
    **shared: Unpack[_Evicts],
) -> Plan: ...
@overload
def plan(method: str, **parameters: Any) -> Plan: ...

"""One file per paper. Importing this package registers every method."""

from kvsieve.methods import fastkv, full, knorm, snapkv, streaming_llm
from kvsieve.methods.base import ScoredEvictor
from kvsieve.methods.fastkv import TSP
from kvsieve.methods.knorm import KNorm
from kvsieve.methods.snapkv import SnapKV
from kvsieve.methods.streaming_llm import StreamingLLM

__all__ = [
    "TSP",
    "KNorm",
    "ScoredEvictor",
    "SnapKV",
    "StreamingLLM",
    "fastkv",
    "full",
    "knorm",
    "snapkv",
    "streaming_llm",
]

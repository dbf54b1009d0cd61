"""One file per paper. Importing this package registers every method."""

from kvsieve.methods import asl, fastkv, full, h2o, knorm, lagkv, snapkv, streaming_llm, tova
from kvsieve.methods.asl import AdaptiveTSP
from kvsieve.methods.base import ScoredEvictor
from kvsieve.methods.fastkv import TSP
from kvsieve.methods.h2o import H2O
from kvsieve.methods.knorm import KNorm
from kvsieve.methods.lagkv import LagKV
from kvsieve.methods.snapkv import SnapKV
from kvsieve.methods.streaming_llm import StreamingLLM
from kvsieve.methods.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "TSP",
    "AdaptiveTSP",
    "KNorm",
    "LagKV",
    "ScoredEvictor",
    "SnapKV",
    "StreamingLLM",
    "asl",
    "fastkv",
    "full",
    "h2o",
    "knorm",
    "lagkv",
    "snapkv",
    "streaming_llm",
    "tova",
]

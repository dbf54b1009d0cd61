"""One file per paper. Importing this package registers every method."""

from kvsieve.methods import (
    a_shape,
    adakv,
    asl,
    attention_matching,
    cake,
    cam,
    capkv,
    chunkkv,
    claa,
    clusterkv,
    compact_attention,
    compactor,
    compresskv,
    corm,
    criticaladakv,
    criticalkv,
    critiprefill,
    curdkv,
    d2o,
    duoattention,
    dynamickv,
    entropy_chunkkv,
    exact_topk,
    expected_attention,
    fastgen,
    fastkv,
    finch,
    flashprefill,
    flexprefill,
    fp8,
    full,
    gemfilter,
    h2o,
    headkv,
    hqq,
    hsa,
    infllm,
    int8,
    joins,
    k8v4,
    kascade,
    keydiff,
    kivi,
    knorm,
    kvcompose,
    kvcrush,
    kvmerger,
    kvsquared,
    kvzip,
    lacache,
    lagkv,
    loki,
    lookahead,
    lukv,
    merged,
    minference,
    mixed,
    morphkv,
    obcache,
    omnikv,
    outlier,
    per_turn,
    pyramidinfer,
    pyramidkv,
    qfilters,
    quest,
    random,
    rerotation,
    rocketkv,
    roco,
    rotated,
    sage_kv,
    schedule,
    scope,
    simlayerkv,
    snapkv,
    sparq,
    specprefill,
    squeezeattention,
    staged,
    streaming_llm,
    threshold,
    tova,
    triattention,
    uncomp,
    vase,
    windowkv,
    xattention,
    zeromerge,
    zigzagkv,
)
from kvsieve.methods.a_shape import AShape
from kvsieve.methods.adakv import AdaKV, GroupedSnapKV
from kvsieve.methods.asl import AdaptiveTSP
from kvsieve.methods.attention_matching import AttentionMatching
from kvsieve.methods.base import ScoredEvictor
from kvsieve.methods.cake import CAKE, CakeScores
from kvsieve.methods.cam import CaM
from kvsieve.methods.capkv import CapKV
from kvsieve.methods.chunkkv import ChunkKV
from kvsieve.methods.claa import CrossLayerTSP
from kvsieve.methods.clusterkv import ClusterKV
from kvsieve.methods.compact_attention import CompactAttention
from kvsieve.methods.compactor import Compactor
from kvsieve.methods.compresskv import CompressKV
from kvsieve.methods.corm import CORM
from kvsieve.methods.criticalkv import CriticalKV
from kvsieve.methods.critiprefill import CritiPrefill
from kvsieve.methods.curdkv import CurDKV
from kvsieve.methods.d2o import D2O
from kvsieve.methods.duoattention import DuoAttention
from kvsieve.methods.dynamickv import DynamicKV
from kvsieve.methods.entropy_chunkkv import EntropyChunkKV
from kvsieve.methods.exact_topk import ExactTopK
from kvsieve.methods.expected_attention import ExpectedAttention
from kvsieve.methods.fastgen import FastGen
from kvsieve.methods.fastkv import TSP
from kvsieve.methods.finch import Finch
from kvsieve.methods.flashprefill import FlashPrefill
from kvsieve.methods.flexprefill import FlexPrefill
from kvsieve.methods.fp8 import FP8
from kvsieve.methods.gemfilter import GemFilter
from kvsieve.methods.h2o import H2O
from kvsieve.methods.headkv import HeadKV
from kvsieve.methods.hqq import HQQ
from kvsieve.methods.hsa import HSA
from kvsieve.methods.infllm import InfLLM
from kvsieve.methods.int8 import Int8
from kvsieve.methods.k8v4 import K8V4
from kvsieve.methods.kascade import Kascade
from kvsieve.methods.keydiff import KeyDiff
from kvsieve.methods.kivi import KIVI
from kvsieve.methods.knorm import KNorm
from kvsieve.methods.kvcompose import KVCompose
from kvsieve.methods.kvcrush import KVCrush
from kvsieve.methods.kvmerger import KVMerger
from kvsieve.methods.kvsquared import KVSquared
from kvsieve.methods.kvzip import KVzip
from kvsieve.methods.lacache import LaCache
from kvsieve.methods.lagkv import LagKV
from kvsieve.methods.loki import Loki
from kvsieve.methods.lookahead import Lookahead
from kvsieve.methods.lukv import LUKV
from kvsieve.methods.merged import MeanMerge
from kvsieve.methods.minference import MInference
from kvsieve.methods.morphkv import MorphKV
from kvsieve.methods.obcache import OBCache
from kvsieve.methods.omnikv import OmniKV
from kvsieve.methods.outlier import Outlier
from kvsieve.methods.per_turn import PerTurn
from kvsieve.methods.pyramidinfer import PyramidInfer
from kvsieve.methods.pyramidkv import PyramidKV
from kvsieve.methods.qfilters import QFilters
from kvsieve.methods.quest import Quest
from kvsieve.methods.random import Random
from kvsieve.methods.rerotation import Rerotation
from kvsieve.methods.rocketkv import RocketEviction
from kvsieve.methods.roco import RoCo
from kvsieve.methods.rotated import Rotated
from kvsieve.methods.sage_kv import SageKV
from kvsieve.methods.schedule import PerLayer
from kvsieve.methods.scope import Scope
from kvsieve.methods.simlayerkv import SimLayerKV
from kvsieve.methods.snapkv import SnapKV
from kvsieve.methods.sparq import SparQ
from kvsieve.methods.specprefill import SpecPrefill
from kvsieve.methods.squeezeattention import SqueezeAttention
from kvsieve.methods.staged import StagedTSP
from kvsieve.methods.streaming_llm import StreamingLLM
from kvsieve.methods.threshold import Threshold
from kvsieve.methods.tova import TOVA
from kvsieve.methods.triattention import TriAttention
from kvsieve.methods.uncomp import UNComp, UNCompStages
from kvsieve.methods.vase import VaSE
from kvsieve.methods.windowkv import WindowKV
from kvsieve.methods.xattention import XAttention
from kvsieve.methods.zeromerge import ZeroMerge
from kvsieve.methods.zigzagkv import ZigZagKV

__all__ = [
    "CAKE",
    "CORM",
    "D2O",
    "FP8",
    "H2O",
    "HQQ",
    "HSA",
    "K8V4",
    "KIVI",
    "LUKV",
    "TOVA",
    "TSP",
    "AShape",
    "AdaKV",
    "AdaptiveTSP",
    "AttentionMatching",
    "CaM",
    "CakeScores",
    "CapKV",
    "ChunkKV",
    "ClusterKV",
    "CompactAttention",
    "Compactor",
    "CompressKV",
    "CritiPrefill",
    "CriticalKV",
    "CrossLayerTSP",
    "CurDKV",
    "DuoAttention",
    "DynamicKV",
    "EntropyChunkKV",
    "ExactTopK",
    "ExpectedAttention",
    "FastGen",
    "Finch",
    "FlashPrefill",
    "FlexPrefill",
    "GemFilter",
    "GroupedSnapKV",
    "HeadKV",
    "InfLLM",
    "Int8",
    "KNorm",
    "KVCompose",
    "KVCrush",
    "KVMerger",
    "KVSquared",
    "KVzip",
    "Kascade",
    "KeyDiff",
    "LaCache",
    "LagKV",
    "Loki",
    "Lookahead",
    "MInference",
    "MeanMerge",
    "MorphKV",
    "OBCache",
    "OmniKV",
    "Outlier",
    "PerLayer",
    "PerTurn",
    "PyramidInfer",
    "PyramidKV",
    "QFilters",
    "Quest",
    "Random",
    "Rerotation",
    "RoCo",
    "RocketEviction",
    "Rotated",
    "SageKV",
    "Scope",
    "ScoredEvictor",
    "SimLayerKV",
    "SnapKV",
    "SparQ",
    "SpecPrefill",
    "SqueezeAttention",
    "StagedTSP",
    "StreamingLLM",
    "Threshold",
    "TriAttention",
    "UNComp",
    "UNCompStages",
    "VaSE",
    "WindowKV",
    "XAttention",
    "ZeroMerge",
    "ZigZagKV",
    "a_shape",
    "adakv",
    "asl",
    "attention_matching",
    "cake",
    "cam",
    "capkv",
    "chunkkv",
    "claa",
    "clusterkv",
    "compact_attention",
    "compactor",
    "compresskv",
    "corm",
    "criticaladakv",
    "criticalkv",
    "critiprefill",
    "curdkv",
    "d2o",
    "duoattention",
    "dynamickv",
    "entropy_chunkkv",
    "exact_topk",
    "expected_attention",
    "fastgen",
    "fastkv",
    "finch",
    "flashprefill",
    "flexprefill",
    "fp8",
    "full",
    "gemfilter",
    "h2o",
    "headkv",
    "hqq",
    "hsa",
    "infllm",
    "int8",
    "joins",
    "k8v4",
    "kascade",
    "keydiff",
    "kivi",
    "knorm",
    "kvcompose",
    "kvcrush",
    "kvmerger",
    "kvsquared",
    "kvzip",
    "lacache",
    "lagkv",
    "loki",
    "lookahead",
    "lukv",
    "merged",
    "minference",
    "mixed",
    "morphkv",
    "obcache",
    "omnikv",
    "outlier",
    "per_turn",
    "pyramidinfer",
    "pyramidkv",
    "qfilters",
    "quest",
    "random",
    "rerotation",
    "rocketkv",
    "roco",
    "rotated",
    "sage_kv",
    "schedule",
    "scope",
    "simlayerkv",
    "snapkv",
    "sparq",
    "specprefill",
    "squeezeattention",
    "staged",
    "streaming_llm",
    "threshold",
    "tova",
    "triattention",
    "uncomp",
    "vase",
    "windowkv",
    "xattention",
    "zeromerge",
    "zigzagkv",
]

"""Attention over stored entries: a request (`request`) is computed by the first executor that takes it (`table`)."""

from kvsieve.attention.latent import LatentQueries, Latents, UpProjection
from kvsieve.attention.reading import Reading, ReadRows
from kvsieve.attention.request import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    EncodedEntries,
    FlatEntries,
    Near,
    ScaledPart,
    Shown,
    Window,
)
from kvsieve.attention.shared import SharedChoices, Sharing
from kvsieve.attention.table import attend, executors, explain, is_for_token_kernel, next_border

__all__ = [
    "AttentionRequest",
    "ChosenBlocks",
    "DenseEntries",
    "EncodedEntries",
    "FlatEntries",
    "LatentQueries",
    "Latents",
    "Near",
    "ReadRows",
    "Reading",
    "ScaledPart",
    "SharedChoices",
    "Sharing",
    "Shown",
    "UpProjection",
    "Window",
    "attend",
    "executors",
    "explain",
    "is_for_token_kernel",
    "next_border",
]

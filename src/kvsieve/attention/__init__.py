"""Attention over stored entries: a request (`request`) is computed by the first executor that takes it (`table`)."""

from kvsieve.attention.latent import LatentQueries as LatentQueries
from kvsieve.attention.latent import Latents as Latents
from kvsieve.attention.latent import UpProjection as UpProjection
from kvsieve.attention.reading import Reading as Reading
from kvsieve.attention.reading import ReadRows as ReadRows
from kvsieve.attention.request import AttentionRequest as AttentionRequest
from kvsieve.attention.request import ChosenBlocks as ChosenBlocks
from kvsieve.attention.request import DenseEntries as DenseEntries
from kvsieve.attention.request import EncodedEntries as EncodedEntries
from kvsieve.attention.request import FlatEntries as FlatEntries
from kvsieve.attention.request import Near as Near
from kvsieve.attention.request import ScaledPart as ScaledPart
from kvsieve.attention.request import Shown as Shown
from kvsieve.attention.request import Window as Window
from kvsieve.attention.shared import SharedChoices as SharedChoices
from kvsieve.attention.shared import Sharing as Sharing
from kvsieve.attention.table import attend as attend
from kvsieve.attention.table import executors as executors
from kvsieve.attention.table import explain as explain
from kvsieve.attention.table import next_border as next_border
from kvsieve.attention.table import token_kernel as token_kernel

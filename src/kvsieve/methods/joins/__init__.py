"""One file per join of documents. Importing this package registers every one."""

from kvsieve.methods.joins.ape import Ape as Ape
from kvsieve.methods.joins.blend import Blend as Blend
from kvsieve.methods.joins.full import Full as Full
from kvsieve.methods.joins.link import Link as Link
from kvsieve.methods.joins.modules import Modules as Modules
from kvsieve.methods.joins.prophet import Prophet as Prophet
from kvsieve.methods.joins.relevant import Relevant as Relevant

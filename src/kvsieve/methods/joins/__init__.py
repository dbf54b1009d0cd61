"""One file per join of documents. Importing this package registers every one."""

from kvsieve.methods.joins import ape, blend, full, link, modules, prophet
from kvsieve.methods.joins.ape import Ape
from kvsieve.methods.joins.blend import Blend
from kvsieve.methods.joins.full import Full
from kvsieve.methods.joins.link import Link
from kvsieve.methods.joins.modules import Modules
from kvsieve.methods.joins.prophet import Prophet

__all__ = ["Ape", "Blend", "Full", "Link", "Modules", "Prophet", "ape", "blend", "full", "link", "modules", "prophet"]

"""One file per join of documents. Importing this package registers every one."""

from kvsieve.methods.joins import full, link, modules
from kvsieve.methods.joins.full import Full
from kvsieve.methods.joins.link import Link
from kvsieve.methods.joins.modules import Modules

__all__ = ["Full", "Link", "Modules", "full", "link", "modules"]

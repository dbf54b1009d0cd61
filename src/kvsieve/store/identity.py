"""Identity of what is stored: what it was read with, and for whom."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from typing import Any

from kvsieve.hf.persist.saved import identity_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.store.radix import Tokens


@dataclass(frozen=True)
class Identity:
    """Weights, tokenizer and plan, of which another one reads other entries.

    Attributes:
        key: the same for all that are alike, whatever they are called.
        header: "model", "tokenizer" and "plan", as in a file.
    """

    key: str
    header: dict[str, Any]

    @classmethod
    def of(cls, header: dict[str, Any]) -> Identity:
        """Make it of a file's header."""
        about = {name: header[name] for name in ("model", "tokenizer", "plan")}
        plain = json.loads(json.dumps(about))
        for names in (plain["model"], plain["plan"], plain["plan"].get("profile", {})):
            for name in ("id", "revision", "name"):
                names.pop(name, None)
        return cls(hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(), about)


class Identities:
    """Identities of attached models, each worked out once."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[AttachedModel, tuple[Any, Identity]] = weakref.WeakKeyDictionary()

    def of(self, model: AttachedModel) -> Identity:
        """Return the identity of a model with its plan and its tokenizer, as they are now."""
        versions = sum(0 if each.is_inference() else each._version for each in model.decoder.parameters())
        state = model.plan, model.adapters, id(model.tokenizer), versions
        known = self._known.get(model)
        if known is None or known[0] != state:
            known = state, Identity.of(identity_of(model, model.tokenizer))
            self._known[model] = known
        return known[1]


def node_key(identity: Identity, owner: str, ids: Tokens, place: str) -> str:
    """Return the name of a node: 32 hex digits. place: tells nodes of the same tokens apart."""
    digest = hashlib.sha256(json.dumps([identity.key, owner, place]).encode())
    digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()[:32]

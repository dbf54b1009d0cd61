"""Identity of stored nodes: weights, tokenizer, plan and owner."""

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
    """Weights, tokenizer and plan of stored entries.

    Attributes:
        key: equal if and only if all three are equal; names do not matter.
        header: "model", "tokenizer" and "plan", as in a file.
    """

    key: str
    header: dict[str, Any]

    @classmethod
    def of(cls, header: dict[str, Any]) -> Identity:
        """Return the identity in a file's header."""
        about = {name: header[name] for name in ("model", "tokenizer", "plan")}
        plain = json.loads(json.dumps(about))
        for names in (plain["model"], plain["plan"], plain["plan"].get("profile", {})):
            for name in ("id", "revision", "name"):
                names.pop(name, None)
        return cls(hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(), about)


class Identities:
    """Cached identities of attached models."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[AttachedModel, tuple[Any, Identity]] = weakref.WeakKeyDictionary()

    def of(self, model: AttachedModel) -> Identity:
        """Return the identity of a model with its current plan and tokenizer."""
        versions = sum(0 if weight.is_inference() else weight._version for weight in model.decoder.parameters())
        state = model.plan, model.adapters, id(model.tokenizer), versions
        known = self._known.get(model)
        if known is None or known[0] != state:
            known = state, Identity.of(identity_of(model, model.tokenizer))
            self._known[model] = known
        return known[1]


def node_key(identity: Identity, owner: str, ids: Tokens, place: str) -> str:
    """Return the name of a node: 32 hex digits. place: distinguishes nodes with the same tokens."""
    digest = hashlib.sha256(json.dumps([identity.key, owner, place]).encode())
    digest.update(ids.astype("<i8").tobytes())
    return digest.hexdigest()[:32]

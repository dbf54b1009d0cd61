"""A process that compiles grammars first: one that takes endless time, memory or stack ends this process alone.

It reads JSON, a line at a time: first the control tokens of the server's tokenizer by id, then the texts of grammars.
It answers each with an error, or an empty text.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Sequence
from typing import Any

from kvsieve.planning.grammars import fault, library, parsed

# Most bytes of memory, and tokens that are chosen by each grammar.
_MEMORY = 2 << 30
_STEPS = 24


class _Bytes:
    """A tokenizer of single bytes and control tokens. controls: by id."""

    eos_token_id = None
    bos_token_id = None

    def __init__(self, controls: dict[int, str]) -> None:
        free = [token for token in range(256 + len(controls)) if token not in controls][:256]
        names = {token: bytes([byte]) for byte, token in enumerate(free)}
        names |= {token: name.encode() for token, name in controls.items()}
        self.known = sorted(names)
        self.tokens = [names.get(token, b"") for token in range(self.known[-1] + 1)]
        self.special_token_ids = list(controls)

    def __call__(self, text: str) -> list[int]:
        raise TypeError("no token is forced, so no text is split")


def trial(text: str, tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return why a grammar cannot be used, or "".

    Args:
        text: of the grammar.
        tokenizer: of llguidance.
        tokens: that it has.
    """
    matcher = parsed(text, tokenizer)
    draw = random.Random(0)
    for _ in range(_STEPS):
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if error := fault(matcher):
            return error
        allowed = [token for token in tokens if bits[token >> 3] >> (token & 7) & 1]
        if not allowed:
            break
        matcher.consume_token(draw.choice(allowed))
    return ""


def main() -> None:
    package = library()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = _Bytes({int(token): name for token, name in json.loads(sys.stdin.readline()).items()})
    tokenizer = package.LLTokenizer(package.TokenizerWrapper(own))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line), tokenizer, own.known)), flush=True)


if __name__ == "__main__":
    main()

"""Write docs/models.md's tables and what `kvsieve models` prints: what runs on a tiny model of each family.

python tests/support/model_table.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import kvsieve
from kvsieve.cli.models_table import (
    EVICTION_ONLY,
    REFUSED,
    SUPPORTED,
    TABLE,
    Row,
    kinds_of,
    models_markdown,
    not_built,
)
from kvsieve.cli.output import one_line
from kvsieve.hf.kinds import describe_kinds
from kvsieve.hf.model.support import why_unsupported
from tiny_models import FAMILIES, Family, build

LATENT = "latent attention: all heads keep the same entries, and plans that read sparsely are refused"
PAGE, MARK = Path(__file__).parents[2] / "docs" / "models.md", "<!-- models -->\n"


def examine(family: Family) -> Row:
    """Return what runs on a family with the installed transformers."""
    model, reason = None, family.why_not_in(metadata.version("transformers"))
    try:
        model = None if reason else build(family.name)
    except Exception as error:  # a config that this version of transformers does not know fails in many ways
        reason = one_line(str(error).strip().partition("\n")[0] or type(error).__name__)
    if model is None:
        return not_built(family.name, family.title, str(reason))
    no_eviction = why_unsupported(model, kvsieve.plan("snapkv"))
    no_propagation = why_unsupported(model, kvsieve.plan("fastkv", tsp_layer=1))
    status = REFUSED if no_eviction else EVICTION_ONLY if no_propagation else SUPPORTED
    kinds = kinds_of(model)
    latent = no_eviction is None and any(kind.entries == "latent" for kind in kinds)
    reason = "; ".join(part for part in (no_eviction or no_propagation, LATENT if latent else None) if part)
    held = describe_kinds(kinds) if kinds else ""
    words = tuple(kind.words for kind in kinds)
    return Row(family.name, family.title, status, no_eviction is None, no_propagation is None, held, words, reason)


def shipped(family: Family, row: Row) -> dict[str, object]:
    """Return a row as the package has it, with the releases that lack the family."""
    releases = {name: getattr(family, name) for name in ("since", "broken") if getattr(family, name)}
    return {**asdict(row), **releases}


def main() -> None:
    version = metadata.version("transformers")
    rows = [examine(family) for family in FAMILIES]
    lines = ",\n".join(json.dumps(shipped(*pair)) for pair in zip(FAMILIES, rows, strict=True))
    TABLE.write_text(f'{{"transformers": "{version}", "models": [\n{lines}\n]}}\n', encoding="utf-8")
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{models_markdown(rows, version)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

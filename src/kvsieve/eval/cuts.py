"""Documents of public benchmarks that were longer than the length, as the samples' `meta` tells."""

from __future__ import annotations

from collections.abc import Iterable

from kvsieve.eval.rows import Row


def cut_documents(rows: Iterable[Row]) -> list[str]:
    """A sentence for every task and length at which documents were cut."""
    cuts: dict[tuple[str, int], dict[int, int]] = {}
    for row in rows:
        meta = row.get("meta") or {}
        if isinstance(meta.get("cut"), int) and isinstance(meta.get("document"), int):
            cuts.setdefault((row["task"], row["length"]), {})[meta["document"]] = meta["cut"]
    return [
        f"{task}: {sum(gone > 0 for gone in found.values())} of {len(found)} documents were cut to {length} tokens"
        for (task, length), found in cuts.items()
        if any(found.values())
    ]

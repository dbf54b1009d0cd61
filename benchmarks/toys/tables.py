"""The tables of docs/toys.md, from what training and measuring left in a results folder.

python -m benchmarks.toys.tables [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.toys.train import RESULTS

GEOMETRIES = ("hybrid", "sinks", "latent")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def training(trained: dict[str, dict[str, Any]]) -> str:
    """Per geometry: its size, and what learning took."""
    rows = []
    for name, run in trained.items():
        held = f"{run['held_out']['answers']:.1%}" + ("" if run["learned"] else ", not learned")
        spent = [f"{run['cpu_s'] / 60:.1f}", f"{run['wall_s'] / 60:.1f}"]
        size = f"{run['parameters'] / 1e6:.1f} M"
        rows.append([name, f"`{run['model_type']}`", size, str(run["steps"]), *spent, held])
    return markdown(["toy", "architecture", "parameters", "steps", "CPU minutes", "minutes", "right answers"], rows)


def answers(rows: list[dict[str, Any]]) -> str:
    """Right answers in percent, one number per share, a dash where a plan is refused."""
    if all("refused" in row for row in rows):
        return "refused"
    return " / ".join("–" if "refused" in row else f"{100 * row['answers']:.0f}" for row in rows)


def plans(found: dict[str, dict[str, Any]], role: str, hidden: bool) -> str:
    """Answers by method, per geometry; where methods choose tokens by a layer, a row for each."""

    def rows_of(name: str) -> dict[str, list[dict[str, Any]]]:
        by: dict[str, list[dict[str, Any]]] = {}
        for row in found[name]["rows"]:
            if row["role"] in ("full", role) and row["hidden"] == hidden:
                layer = "" if row["layer"] is None else f", layer {row['layer']}"
                by.setdefault(f"`{row['method']}`{layer}", []).append(row)
        return by

    tables = {name: rows_of(name) for name in found}
    labels = dict.fromkeys(label for table in tables.values() for label in table)
    rows = [
        [label, *(answers(table[label]) if label in table else "" for table in tables.values())] for label in labels
    ]
    return markdown(["method", *tables], rows)


def states(rows: list[dict[str, Any]]) -> str:
    """What propagation does to the states behind the layer where tokens are chosen."""
    head, lines = ["method", "goes on", "right answers"], []
    told = [row for row in rows if row.get("state_change")]
    layers = list(told[0]["state_change"]) if told else []
    for row in told:
        layer = "" if row["layer"] is None else f", layer {row['layer']}"
        changes = [f"{row['state_change'][each]:.2f}" for each in layers]
        lines.append([f"`{row['method']}`{layer}", f"{row['share']:.0%}", f"{100 * row['answers']:.0f}", *changes])
    return markdown([*head, *(f"state {layer}" for layer in layers)], lines)


def tables(results: Path) -> dict[str, str]:
    """Every table by name, of the geometries whose results are there."""

    def read(suffix: str) -> dict[str, dict[str, Any]]:
        files = {name: results / f"toys_{name}{suffix}.json" for name in GEOMETRIES}
        return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}

    trained, found = read(""), read("_methods")
    out = {"training": training(trained)} if trained else {}
    for role, hidden in (("evict", False), ("evict", True), ("read", False), ("propagate", False), ("propagate", True)):
        out[f"{role}, {'hidden' if hidden else 'visible'}"] = plans(found, role, hidden)
    if "hybrid" in found:
        out["states"] = states(found["hybrid"]["rows"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    for name, text in tables(parser.parse_args().results).items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()

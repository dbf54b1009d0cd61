"""Print tables of the toys' results: training, answers by method and share, states. docs/evaluation.md shows a summary.

python -m benchmarks.toys.tables [--results benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.toys.train import RESULTS

GEOMETRIES = ("hybrid", "hybrid_early", "sinks", "latent")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without blanks beside its bars."""
    return "\n".join(f"|{'|'.join(line)}|" for line in (head, ["---"] * len(head), *rows))


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
    """Right answers in percent, one number per share: a dash where refused, a star where all tokens went on."""
    if all("refused" in row for row in rows):
        return "refused"
    return " / ".join("–" if "refused" in row else f"{100 * row['answers']:.0f}{star(row)}" for row in rows)


def star(row: dict[str, Any]) -> str:
    """Mark a propagator under which all tokens went on."""
    return "\\*" if row["role"] == "propagate" and not row["applied"] else ""


def plans(found: dict[str, dict[str, Any]], roles: Sequence[str], hidden: bool) -> str:
    """Answers by method, per geometry; where methods choose tokens by a layer, a row for each."""

    def rows_of(name: str) -> dict[str, list[dict[str, Any]]]:
        by: dict[str, list[dict[str, Any]]] = {}
        for row in found[name]["rows"]:
            if row["role"] in ("full", *roles) and row["hidden"] == hidden:
                layer = "" if row["layer"] is None else f", layer {row['layer']}"
                by.setdefault(f"`{row['method']}`{layer}", []).append(row)
        return by

    measured = [name for name in found if any(row["role"] in roles for row in found[name]["rows"])]
    tables = {name: rows_of(name) for name in measured}
    labels = list(dict.fromkeys(label for table in tables.values() for label in table))
    methods = [label.partition(",")[0] for label in labels]
    labels.sort(key=lambda label: (methods.index(label.partition(",")[0]), label))
    rows = [
        [label, *(answers(table[label]) if label in table else "" for table in tables.values())] for label in labels
    ]
    return markdown(["method", *tables], rows)


def summary(results: Path, share: float = 0.25) -> str:
    """Return right answers by method at one share of entries or tokens, with the question visible."""
    found = _read(results, "_methods")
    for report in found.values():
        report["rows"] = [row for row in report["rows"] if row["role"] == "full" or row["share"] == share]
    return plans(found, ("evict", "read", "propagate"), hidden=False)


def where(mass: dict[str, dict[str, float]]) -> str:
    """Where each toy finds the answer."""
    layers = sorted({layer for each in mass.values() for layer in each}, key=int)
    rows = ([toy, *(f"{each[layer]:.2f}" if layer in each else "" for layer in layers)] for toy, each in mass.items())
    return markdown(["toy", *(f"layer {layer}" for layer in layers)], rows)


def states(found: dict[str, dict[str, Any]]) -> str:
    """What propagation does to the states behind the layer where tokens are chosen."""
    rows = [(name, row) for name, each in found.items() for row in each["rows"]]
    # FastKV's propagation is "tsp", and where ASL drops nothing no state changes.
    shown = [(name, row) for name, row in rows if row.get("state_change") and row["method"] not in ("fastkv", "asl")]
    layers = list(shown[0][1]["state_change"]) if shown else []
    lines = []
    for name, row in shown:
        layer = "" if row["layer"] is None else f", layer {row['layer']}"
        changes = [f"{row['state_change'][each]:.3f}" for each in layers]
        lines.append([name, f"`{row['method']}`{layer}", f"{row['share']:.0%}", answers([row]), *changes])
    head = ["toy", "method", "goes on", "right answers", *(f"state of layer {layer}" for layer in layers)]
    return markdown(head, lines)


def tables(results: Path) -> dict[str, str]:
    """Every table by name, of the geometries with results."""
    trained, found = _read(results, ""), _read(results, "_methods")
    out = {"training": training(trained)} if trained else {}
    for role, hidden in (("evict", False), ("evict", True), ("read", False), ("propagate", False), ("propagate", True)):
        out[f"{role}, {'hidden' if hidden else 'visible'}"] = plans(found, [role], hidden)
    out["states"] = states(found)
    if (results / "toys_where.json").exists():
        out["where"] = where(json.loads((results / "toys_where.json").read_text())["answer_mass"])
    return out


def _read(results: Path, suffix: str) -> dict[str, dict[str, Any]]:
    files = {name: results / f"toys_{name}{suffix}.json" for name in GEOMETRIES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def filled(page: str, found: dict[str, str]) -> str:
    """Put each table between its marks: a comment with its name, and the next that says "end"."""
    for name, text in found.items():
        before, mark, behind = page.partition(f"<!-- {name} -->\n")
        if not mark:
            raise ValueError(f"the page has no place for the table {name!r}: add <!-- {name} --> and <!-- end -->")
        _, end, after = behind.partition("<!-- end -->")
        page = f"{before}{mark}\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    for name, text in tables(parser.parse_args().results).items():
        print(f"## {name}\n\n{text}\n")


if __name__ == "__main__":
    main()

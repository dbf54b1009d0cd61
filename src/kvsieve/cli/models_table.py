"""`kvsieve models`: methods by architecture, found by tests/support/model_table.py on a tiny model of each."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsieve.cli.options import OUTPUT, option
from kvsieve.cli.output import JsonOption, emit_json, print_table, show
from kvsieve.errors import UnsupportedModelError
from kvsieve.report.tables import markdown_table

if TYPE_CHECKING:
    from kvsieve.hf.kinds import LayerKind

SUPPORTED = "supported"
EVICTION_ONLY = "eviction only"
REFUSED = "refused"
NOT_BUILT = "not in this transformers"

# `make docs` renews it.
TABLE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Row:
    """Row of the table: a family, and the methods that run on it.

    Attributes:
        family: the transformers `model_type`, or `model_type:variant`.
        title: well-known models.
        status: "supported", "eviction only", "refused" or "not in this transformers".
        eviction: True if methods such as `snapkv` run.
        propagation: True if methods such as `fastkv` run.
        layers: description of the tiny model's layers; "" if unknown.
        layer_kinds: kind of each layer.
        reason: why not everything runs; "" if it does.
    """

    family: str
    title: str
    status: str
    eviction: bool
    propagation: bool
    layers: str
    layer_kinds: tuple[str, ...]
    reason: str


def models_command(
    as_json: JsonOption = False,
    markdown: Annotated[bool, option(OUTPUT, "Tables of docs/models.md", "--markdown")] = False,
) -> None:
    """List the supported architectures, and why others are not."""
    installed = metadata.version("transformers")
    found_with, rows = shipped_rows(installed)
    if as_json:
        emit_json({"transformers": found_with, "models": [asdict(row) for row in rows]})
        return
    if markdown:
        print(models_markdown(rows, found_with))
        return
    headers = ["family", "models", "eviction", "propagation", "layers", "reason"]
    print_table(headers, [_cells(row) for row in rows], left=len(headers))
    show(_summary(rows, found_with))
    if installed != found_with:
        show(f"transformers {installed} is installed: `kvsieve doctor MODEL` examines a model under it")


def models_markdown(rows: list[Row], version: str) -> str:
    """Return the tables of docs/models.md: supported families, then the others grouped by reason."""
    runs = [[row.family, row.title, _short_kinds(row)] for row in rows if row.eviction]
    partly: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status != SUPPORTED:
            reason = row.reason.removeprefix(f"{NOT_BUILT}: ").partition("; ")[0]
            partly.setdefault((row.status, reason), []).append(f"{row.family} ({row.title})")
    tables = (
        markdown_table(["family", "models", "layers"], runs),
        markdown_table(["status", "reason", "families"], [[*key, ", ".join(names)] for key, names in partly.items()]),
    )
    return "\n\n".join((_summary(rows, version), *tables))


def _short_kinds(row: Row) -> str:
    short = (re.sub(r"sliding | of \d+| with layer \d+|attention in | attention", "", kind) for kind in row.layer_kinds)
    return ", ".join(dict.fromkeys(short))


def shipped_rows(version: str) -> tuple[str, list[Row]]:
    """Return the release of transformers that the table was found with, and its rows for another one, `version`."""
    shipped = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = []
    for values in shipped["models"]:
        needs = why_not_in(version, values.pop("since", ""), values.pop("broken", ""))
        row = Row(**{**values, "layer_kinds": tuple(values["layer_kinds"])})
        rows.append(row if needs is None else not_built(row.family, row.title, needs))
    return shipped["transformers"], rows


def why_not_in(version: str, since: str, broken: str) -> str | None:
    """Return why a release of transformers, such as "5.23.0", cannot run a family; None when it can.

    Args:
        version: the release.
        since: the release that brought the family, such as "5.19"; "" where every supported one has it.
        broken: a release whose own code for it fails, such as "5.24.0"; "" where none is known.
    """
    if version == broken:
        return f"transformers {version} cannot run it itself"
    return f"needs {since} or later" if since and _numbers(version) < _numbers(since) else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def not_built(family: str, title: str, reason: str) -> Row:
    """Return the row of a family that the installed transformers does not have."""
    return Row(family, title, NOT_BUILT, False, False, "", (), f"{NOT_BUILT}: {reason}")


def kinds_of(model: Any) -> tuple[LayerKind, ...]:
    from kvsieve.hf.compat import text_config
    from kvsieve.hf.kinds import layer_kinds

    if model.config.is_encoder_decoder:
        return ()
    with contextlib.suppress(UnsupportedModelError):
        return layer_kinds(text_config(model))
    return ()


def _cells(row: Row) -> list[str]:
    words = {True: "yes", False: "no"}
    return [row.family, row.title, words[row.eviction], words[row.propagation], row.layers, row.reason]


def _summary(rows: list[Row], version: str) -> str:
    counts = {status: sum(row.status == status for row in rows) for status in (SUPPORTED, EVICTION_ONLY, REFUSED)}
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    missing = sum(row.status == NOT_BUILT for row in rows)
    return f"transformers {version}: {text}" + (f", {missing} {NOT_BUILT}" if missing else "") + "."

"""`kvsieve models`: methods by architecture, found by examining a tiny model of each."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsieve.cli.options import OUTPUT, option
from kvsieve.cli.output import JsonOption, emit_json, one_line, print_table, show
from kvsieve.errors import UnsupportedModelError
from kvsieve.report.tables import markdown_table

if TYPE_CHECKING:
    from kvsieve.hf.kinds import LayerKind

SUPPORTED, EVICTION_ONLY, REFUSED, NOT_BUILT = "supported", "eviction only", "refused", "not in this transformers"

LATENT = "latent attention: all heads keep the same entries, and plans that read sparsely are refused"
# Output of `kvsieve models --json`; `make docs` renews it.
_TABLE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Row:
    """Row of the table: a family, and the methods that run on it.

    Attributes:
        family: its name in `kvsieve.models.families`.
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
    version = metadata.version("transformers")
    rows = None if markdown else shipped_rows(version)
    rows = list(_with_progress()) if rows is None else rows
    if as_json:
        emit_json({"transformers": version, "models": [asdict(row) for row in rows]})
        return
    if markdown:
        print(models_markdown(rows, version))
        return
    headers = ["family", "models", "eviction", "propagation", "layers", "reason"]
    print_table(headers, [_cells(row) for row in rows], left=len(headers))
    show(_summary(rows, version))


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
    """Return each kind of layer once, such as "window, full"."""
    short = (re.sub(r"sliding | of \d+| with layer \d+|attention in | attention", "", kind) for kind in row.layer_kinds)
    return ", ".join(dict.fromkeys(short))


def shipped_rows(version: str) -> list[Row] | None:
    """Return the rows found with this version of transformers, without importing it; None for other versions.

    Also None if this process has imported transformers, and may have changed it.
    """
    if "transformers" in sys.modules:
        return None
    shipped = json.loads(_TABLE.read_text(encoding="utf-8"))
    if shipped["transformers"] != version:
        return None
    return [Row(**{**row, "layer_kinds": tuple(row["layer_kinds"])}) for row in shipped["models"]]


def _with_progress() -> Iterator[Row]:
    """Examine every family, which takes about half a minute."""
    from rich.console import Console
    from rich.progress import track
    from transformers.utils import logging

    from kvsieve.models.families import FAMILIES

    logging.set_verbosity_error()
    console = Console(stderr=True)
    families = track(
        FAMILIES, "building a tiny model of each", console=console, transient=True, disable=not console.is_terminal
    )
    for family in families:
        yield _examine(family)


def _examine(family: Any) -> Row:
    import kvsieve
    from kvsieve.hf.kinds import describe_kinds
    from kvsieve.hf.model.support import why_unsupported
    from kvsieve.models.families import build

    model, reason = None, family.why_not_in(metadata.version("transformers"))
    try:
        model = None if reason else build(family.name)
    except Exception as error:  # a config that this version of transformers does not know fails in many ways
        reason = one_line(str(error).strip().partition("\n")[0] or type(error).__name__)
    if model is None:
        return Row(family.name, family.title, NOT_BUILT, False, False, "", (), f"{NOT_BUILT}: {reason}")
    no_eviction = why_unsupported(model, kvsieve.plan("snapkv"))
    no_propagation = why_unsupported(model, kvsieve.plan("fastkv", tsp_layer=1))
    status = REFUSED if no_eviction else EVICTION_ONLY if no_propagation else SUPPORTED
    kinds = kinds_of(model)
    latent = no_eviction is None and any(kind.entries == "latent" for kind in kinds)
    reason = "; ".join(part for part in (no_eviction or no_propagation, LATENT if latent else None) if part)
    held = describe_kinds(kinds) if kinds else ""
    words = tuple(kind.words for kind in kinds)
    return Row(family.name, family.title, status, no_eviction is None, no_propagation is None, held, words, reason)


def kinds_of(model: Any) -> tuple[LayerKind, ...]:
    """Return the kinds of the decoder's layers; () if unknown."""
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

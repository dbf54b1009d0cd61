"""HTML page of a conversation's text, coloured by its share in the cache."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import torch

from kvsieve.hf.kept_tokens.page_parts import SCRIPT, STYLE
from kvsieve.hf.kept_tokens.tokens import KeptLayer, KeptTokens
from kvsieve.report import html as h
from kvsieve.report.display import percent, span
from kvsieve.report.tables import Entry, Table

# Shares are encoded as a byte of so many parts; this value marks tokens that did not reach the layer.
PARTS = 200
UNREACHED = 255
# Most tokens shown in a notebook.
_SHOWN = 2000

LEGEND = "".join(f'<i class="s{level}">{10 * level}%</i>' for level in range(11))


def html_page(kept: KeptTokens, find: str = "") -> str:
    """Return the page; see Kept.to_html."""
    facts = h.text_table("In short", ["", ""], kept.describe())
    verb = "lets the answer read" if kept.is_view else "still holds"
    intro = h.paragraph(f"Each token is coloured by the share of layers and KV heads that {verb} it.")
    deep = "" if kept.deep is None else h.paragraph("Underlined tokens came to the deepest layer.", "quiet")
    search = (
        '<p><label for="find">Why did it forget this? Look for </label>'
        f'<input id="find" type="search" size="40" value="{h.text(find)}"></p>\n'
        '<div id="found" aria-live="polite"></div>'
    )
    text = f'<p class="tokens legend">{LEGEND}</p>\n<div class="tokens" id="text">{"".join(_parts(kept))}</div>'
    reached = f", sand: {h.text(kept.unreached)}" if any(layer.reached is not None for layer in kept.layers) else ""
    map_ = (
        '<figure id="map"><figcaption>Layers by position in the text, the first layer on top. Blue: the share of heads '
        f"that hold a token; pale: none{reached}; red marks below: what was looked for.</figcaption>"
        '<canvas role="img" aria-label="Share of KV heads that hold each token, by layer; the table below has the '
        'numbers"></canvas></figure>'
    )
    sections = [
        ("text-kept", "Text", f"{search}\n{deep}\n{text}"),
        ("layers", "Layers", f"{map_}\n{h.table(layer_table(kept))}"),
        ("facts", "In short", facts),
    ]
    extra = f'{_data(kept)}\n<p id="status" role="status" hidden></p>\n<script>{SCRIPT}</script>'
    return h.page(f"Kept under {kept.method}", sections, intro, style=STYLE, end=extra, made_by="kvsieve run --show")


def short_html(kept: KeptTokens) -> str:
    """Return the coloured text for a notebook, truncated if long."""
    spans = "".join(_spans(kept, 0, min(len(kept), _SHOWN), styled=True))
    rest = (
        "" if len(kept) <= _SHOWN else h.paragraph(f"The first {_SHOWN} of {len(kept)} tokens; kept.to_html() has all.")
    )
    return f'<div style="white-space:pre-wrap;max-height:24em;overflow:auto;font-family:monospace">{spans}</div>{rest}'


def layer_table(kept: KeptTokens) -> Table:
    """Return a table of the entries of every layer."""
    headers = ["layer", "kind", "entries per KV head", "held"]
    reached = any(layer.reached is not None for layer in kept.layers)
    read = kept.is_view
    headers += ["read by the answer"] * read + [f"tokens {kept.unreached}"] * reached
    rows = []
    for layer in kept.layers:
        cells = [str(layer.index), layer.kind, *_numbers(layer)]
        cells += [_share(layer.shown)] * read
        cells += ["0" if layer.reached is None else str(int((~layer.reached).sum()))] * reached
        rows.append([Entry(cell) for cell in cells])
    return Table("Layers", headers, rows, names=2)


def _numbers(layer: KeptLayer) -> list[str]:
    return ["–" if layer.stored is None else span(layer.entries), _share(layer.stored)]


def _share(part: torch.Tensor | None) -> str:
    return "–" if part is None else percent(float(part.mean()))


def _parts(kept: KeptTokens) -> Iterator[str]:
    for name, start, end in kept.parts:
        if len(kept.parts) > 1:
            yield f'<b class="part">{h.text(name)}, {end - start} tokens</b>'
        yield f'<div class="run">{"".join(_spans(kept, start, end))}</div>'


def _spans(kept: KeptTokens, start: int, end: int, *, styled: bool = False) -> Iterator[str]:
    """Yield an element per piece of text. styled: with inline colours, for use without the style sheet."""
    share = kept.share
    deep = kept.deep
    for piece in kept.pieces:
        if not start <= piece.start < end:
            continue
        where = slice(piece.start, piece.end)
        mean = float(share[where].mean())
        text = h.text(piece.text)
        if styled:
            yield f'<span style="background:rgba(11,92,173,{0.6 * mean:.2f})" title="{mean:.0%}">{text}</span>'
            continue
        # The lowest class is for tokens stored nowhere, the highest for tokens stored everywhere.
        level = 0 if mean == 0 else 10 if mean == 1 else min(9, max(1, round(10 * mean)))
        kinds = [f"s{level}", *["c"] * piece.control, *["n"] * ("\n" in piece.text)]
        kinds += ["d"] * (deep is not None and bool(deep[where].any()))
        many = f" data-n={piece.end - piece.start}" if piece.end - piece.start > 1 else ""
        yield f'<i class="{" ".join(kinds)}"{many}>{text}</i>'


def _data(kept: KeptTokens) -> str:
    """Return the shares of counted layers and tokens as bytes, row by row, for the script."""
    layers = kept.counted
    rows = []
    for layer in layers:
        assert layer.shown is not None
        row = (layer.shown * PARTS).round().clamp(max=PARTS)
        # A token in some heads only is neither 0 nor all.
        row = torch.where((layer.shown > 0) & (row == 0), 1, row)
        row = torch.where((layer.shown < 1) & (row == PARTS), PARTS - 1, row)
        if layer.reached is not None:
            row = torch.where(layer.reached | (layer.shown > 0), row, UNREACHED)
        rows.append(row.to(torch.uint8))
    data = torch.stack(rows).numpy().tobytes() if rows else b""
    facts = {
        "layers": [layer.index for layer in layers],
        "heads": [layer.heads for layer in layers],
        "tokens": len(kept),
        "unreached": kept.unreached,
        "lost": "not read" if kept.is_view else "evicted",
        "shares": base64.b64encode(data).decode("ascii"),
    }
    text = json.dumps(facts).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'

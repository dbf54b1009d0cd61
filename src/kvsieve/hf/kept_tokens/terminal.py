"""Map of layers and positions for a terminal."""

from __future__ import annotations

import torch

from kvsieve.hf.kept_tokens.tokens import KeptLayer, KeptTokens
from kvsieve.report.display import percent, span
from kvsieve.text import printable

_LINES = 32
# Signs by upper bound of the share; tokens that never reached a layer have their own.
_SIGNS = ((0.0, " "), (0.1, "░"), (0.34, "▒"), (0.67, "▓"), (1.0, "█"))
_LEGEND = "░ to 10%  ▒ to 34%  ▓ to 67%  █ more"
_UNREACHED = "·"


def map_text(kept: KeptTokens, width: int) -> str:
    """Draw a map of layers and positions in lines of at most `width` characters, with notes below."""
    facts = [f"{name}: {text}" for name, text in kept.describe()]
    layers = kept.counted
    if not layers:
        return printable("\n".join([f"{kept.method}: no layer holds tokens by position", *facts]))
    together = -(-len(layers) // _LINES)
    names = [f"{part[0].index}" + (f"–{part[-1].index}" if len(part) > 1 else "") for part in _groups(layers, together)]
    edge = max(len("layer"), *map(len, names))
    bins = max(1, min(len(kept), max(10, width - edge - 20)))
    shares = kept.map(bins)
    lines = [f"{kept.method}: " + ("read by the answer" if kept.is_view else "held") + " by layer and position"]
    for name, group in zip(names, _groups(layers, together), strict=True):
        row = shares[[layer.index for layer in group]].mean(0)
        came = torch.stack([_came(layer.reached, len(kept), bins) for layer in group]).any(0)
        signs = "".join(_sign(share, here) for share, here in zip(row.tolist(), came.tolist(), strict=True))
        entries = span(entries for layer in group for entries in layer.entries)
        mean_share = sum(float(layer.shown.mean()) for layer in group if layer.shown is not None) / len(group)
        lines.append(f"{name:>{edge}} |{signs}| {percent(mean_share):>4} {entries}")
    last = f"token {len(kept) - 1}"
    lines.append(f"{'':>{edge}}  0{last:>{bins - 1}}")
    reached = f"  {_UNREACHED} {kept.unreached}" if any(layer.reached is not None for layer in layers) else ""
    return printable("\n".join([*lines, f"{'':>{edge}}  {_LEGEND}{reached}", *facts]))


def _groups(layers: list[KeptLayer], together: int) -> list[list[KeptLayer]]:
    return [layers[at : at + together] for at in range(0, len(layers), together)]


def _came(reached: torch.Tensor | None, length: int, bins: int) -> torch.Tensor:
    """Return bool [bins]: bins with tokens that reached a layer."""
    place = torch.arange(length) * bins // length
    return torch.bincount(place if reached is None else place[reached], minlength=bins) > 0


def _sign(share: float, came: bool) -> str:
    if not came:
        return _UNREACHED
    return next(sign for most, sign in _SIGNS if share <= most + 1e-6)

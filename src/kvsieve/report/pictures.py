"""A drawn picture with its texts for a page."""

from __future__ import annotations

from dataclasses import dataclass

# An SVG above this is slower to show than the PNG, and larger.
SVG_LIMIT = 300_000


@dataclass(frozen=True)
class Picture:
    """A picture. kind: its section in the report. alt: description for readers who cannot see it."""

    name: str
    kind: str
    title: str
    alt: str
    width: int
    svg: bytes
    png: bytes | None

    @property
    def inline(self) -> tuple[str, bytes]:
        if self.png is not None and len(self.svg) > SVG_LIMIT:
            return "image/png", self.png
        return "image/svg+xml", self.svg

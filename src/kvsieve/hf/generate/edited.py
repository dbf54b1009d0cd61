"""Statistics of an answer from an edited or joined cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.report.display import percent


@dataclass(frozen=True)
class EditedEntries:
    """Entries of a prompt that edits and joins have left.

    Attributes:
        share: share of the prompt's tokens with approximate entries.
        reused: tokens that kept their entries in the edit or join before this turn; 0 without one.
        reread: tokens that it prefilled.
        rules: rules by which entries are approximate, such as "edit:window=32"; [] if all are exact.
    """

    share: float
    reused: int
    reread: int
    rules: list[str]

    def __str__(self) -> str:
        text = f"{percent(self.share)} of the prompt's tokens approximate" if self.rules else "exact"
        text += f" ({', '.join(self.rules)})" if self.rules else ""
        if self.reused or self.reread:
            text += f", {self.reused} tokens reused, {self.reread} prefilled before this turn"
        return text


def edited_entries(cache: SieveCache) -> EditedEntries | None:
    """Return the effect of edits on the last prompt, None for one without."""
    conversation = cache.conversation
    edits = conversation.edits
    recent = 0 < edits.seen >= conversation.turn.start
    if not recent and not conversation.approximate:
        return None
    return EditedEntries(
        share=round(edits.share(conversation.turn.record.prompt_tokens), 4),
        reused=edits.reused if recent else 0,
        reread=edits.reread if recent else 0,
        rules=list(conversation.approximate),
    )

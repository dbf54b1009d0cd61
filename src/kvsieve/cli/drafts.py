"""`--draft` of several commands: tokens that are drafted, and then verified several in one pass."""

from __future__ import annotations

from typing import Annotated

from kvsieve.cli.loading import check_model_name
from kvsieve.cli.options import GENERATION, option
from kvsieve.errors import InputError, KvsieveError
from kvsieve.planning.drafts import Draft, as_draft
from kvsieve.planning.named import plan
from kvsieve.planning.suggestions import did_you_mean

DraftOption = Annotated[
    str | None,
    option(
        GENERATION,
        "Draft, verified several tokens per pass: lookup, lookup:tokens=8:ngram=3, self:PLAN, or a smaller model "
        "(default: none)",
        metavar="SPEC",
    ),
]


def parse_draft(text: str | None, memory: int | None = None) -> Draft | None:
    """Return the draft of --draft, checked without importing torch.

    memory: of --memory, which does not count what a draft stores.

    Raises InputError, PlanError or ModelLoadError.
    """
    draft = as_draft(text)
    if draft is None:
        return None
    if memory is not None and draft.kind != "lookup":
        raise InputError(
            f"--memory does not count what --draft {draft} stores; leave one of them out, or take --draft lookup"
        )
    if draft.view is not None:
        plan(draft.view)
    if isinstance(draft.model, str) and draft.model != "demo":
        try:
            check_model_name(draft.model)
        except KvsieveError as error:
            if meant := did_you_mean(draft.model, ["lookup", "self", "demo"], None):
                raise InputError(
                    f"--draft is lookup, self:PLAN, demo or a model, got {draft.model!r}{meant}"
                ) from error
            raise
    return draft

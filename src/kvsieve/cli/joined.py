"""Documents of `kvsieve run`, each prefilled alone and joined for the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsieve.cli.documents import document_texts
from kvsieve.cli.options import PROMPT, option
from kvsieve.cli.output import show
from kvsieve.errors import InputError
from kvsieve.report.display import percent

if TYPE_CHECKING:
    from kvsieve.hf.join.join import Joined
    from kvsieve.hf.reuse import PromptStore

DocumentsOption = Annotated[
    list[str] | None,
    option(
        PROMPT,
        "Document files, separated by commas, each prefilled alone, joined before --question; repeatable (default: "
        "none)",
        metavar="FILE,FILE",
    ),
]
JoinOption = Annotated[
    str | None,
    option(PROMPT, "Join of --documents: modules, blend, full ... (default: link:shift=true)", metavar="JOIN"),
]


def given_documents(given: Sequence[str] | None, question: str | None, unusable: dict[str, Any]) -> list[str]:
    """Return the texts of the files of --documents, each after the file's name; [] without the option.

    Args:
        given: values of the option.
        question: of the same command.
        unusable: values of options that joined documents do not take, by name.

    Raises:
        InputError: no question, no file between two commas, stdin twice, an unusable option, or see `document_texts`.
    """
    if not given:
        return []
    # A name may have a comma itself.
    parts = [[part] if Path(part).is_file() else part.split(",") for part in given]
    names = [name.strip() for part in parts for name in part]
    if not all(names):
        raise InputError(f"--documents has a comma without a file, got {','.join(given)!r}; write a.txt,b.txt")
    if names.count("-") > 1:
        raise InputError("--documents names stdin (-) more than once; write the text to a file, and name that")
    if not question or not question.strip():
        raise InputError('--documents needs a question: add --question "What was decided?"')
    for name, value in unusable.items():
        if value:
            raise InputError(f"--documents goes without {name}; leave one of them out")
    return document_texts(names)


def parse_join(kind: str | None, documents: Sequence[str]) -> str:
    """Return the join in its text form. Raises InputError without documents, and PlanError for an unknown one."""
    if kind is not None and not documents:
        raise InputError("--join needs the documents to join; name them with --documents a.txt,b.txt")
    from kvsieve.planning.joins import JOIN, join_of

    return join_of(JOIN if kind is None else kind).spec


@dataclass(frozen=True)
class EncodedDocuments:
    """Token ids of documents, and of the prompt before the first and after the last; kind: of their join."""

    before: list[int]
    documents: list[list[int]]
    question: list[int]
    kind: str

    def join(self, sieve: Any, store: PromptStore | None, options: dict[str, Any]) -> Joined:
        """Return the joined documents. options: of generate; chunk and progress are used."""
        how = {"chunk": options["chunk"], "progress": options.get("progress")}
        joined: Joined = sieve.join(
            self.documents, self.before or None, kind=self.kind, question=self.question, store=store, **how
        )
        return joined


def join_facts(joined: Joined, documents: int) -> dict[str, Any]:
    """Return the numbers of a join, for JSON."""
    return {
        "documents": documents,
        "tokens": joined.ids.shape[1],
        "kind": joined.kind,
        "found": joined.found,
        "prefilled": joined.prefilled,
        "reused": joined.reused,
        "reread": joined.reread,
        "seconds": joined.seconds,
    }


def print_joins(results: Sequence[dict[str, Any]], name: str) -> None:
    """Print a line per result with a join."""
    for result in results:
        if (facts := result.get("join")) is None:
            continue
        edited = result["stats"].edited
        show(
            f"join: {result[name]}: {facts['kind']}, {facts['documents']} documents, {facts['tokens']} tokens: "
            f"{facts['found']} from the store, {facts['prefilled']} prefilled alone, {facts['reread']} in place, in "
            f"{facts['seconds']:.2f} s; {'exact' if edited is None else percent(edited.share) + ' approximate'}"
        )

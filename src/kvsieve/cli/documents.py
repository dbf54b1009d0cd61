"""Documents as text: plain text, Markdown, PDF and DOCX files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvsieve.cli.prompts import read_text
from kvsieve.errors import InputError, KvsieveError

_EXTRA = "pip install 'kvsieve[documents]'"


def read_documents(names: Sequence[str]) -> str:
    """Return the text of the files, each after its name if there are several.

    Args:
        names: paths; - for stdin. The suffix marks PDF and DOCX files; others are UTF-8 text.

    Raises:
        InputError: a file cannot be read, or has no text.
        KvsieveError: a library for such files is missing.
    """
    return _read(names[0]).strip() if len(names) == 1 else "\n\n".join(document_texts(names))


def document_texts(names: Sequence[str]) -> list[str]:
    """Return the text of each file after its name; see `read_documents`."""
    return [f"{Path(name).name}\n\n{_read(name).strip()}" for name in names]


def _read(name: str) -> str:
    reader = _READERS.get(Path(name).suffix.lower())
    if reader is None:
        return read_text(name, "document")
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise InputError(
            f"cannot read the document {name!r}: {'it is a directory' if path.is_dir() else 'no such file'}"
        )
    try:
        text = reader(path)
    except KvsieveError:
        raise
    except Exception as error:
        raise InputError(f"cannot read the document {name!r}: {type(error).__name__}: {error}") from error
    if not text.strip():
        raise InputError(f"the document {name!r} has no text in it; a scan needs text recognition first")
    return text


def _read_pdf(path: Path) -> str:
    try:
        import pypdf
    except ImportError as error:
        raise KvsieveError(f"a PDF file needs pypdf: {_EXTRA}") from error
    return "\n\n".join(page.extract_text().strip() for page in pypdf.PdfReader(path).pages)


def _read_docx(path: Path) -> str:
    try:
        import docx
    except ImportError as error:
        raise KvsieveError(f"a DOCX file needs python-docx: {_EXTRA}") from error
    return "\n\n".join(text for part in docx.Document(str(path)).iter_inner_content() if (text := _text_of(part)))


def _text_of(part: Any) -> str:
    from docx.table import Table

    if not isinstance(part, Table):
        return str(part.text)
    return "\n".join("\t".join(cell.text for cell in row.cells) for row in part.rows)


_READERS: dict[str, Callable[[Path], str]] = {".pdf": _read_pdf, ".docx": _read_docx}

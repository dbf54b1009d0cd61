"""For `make site`: links to files outside docs/ lead to the repository, and pictures there are shown.

A warning fails the build: a link to a file that does not exist, and a page that loads something from elsewhere.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s#]+)(#[^)\s]+)?\)")
_ELSEWHERE = r'="((?:https?:)?//[^"]+)'
_SOURCES = rf"<(?:script|img|iframe)\b[^>]*\bsrc{_ELSEWHERE}"
_LOADED = re.compile(rf'{_SOURCES}|<link\b[^>]*\brel="stylesheet"[^>]*\bhref{_ELSEWHERE}')
_log = logging.getLogger("mkdocs.hooks.site_links")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures that pages show; called by mkdocs once."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent
    shown = warn_of_missing(files.documentation_pages(), root)
    for path in sorted(shown):
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def warn_of_missing(pages: Any, root: Path) -> set[str]:
    """Return the pictures outside docs/ that pages show; warn of links to files that do not exist."""
    shown = set()
    for page in pages:
        for picture, _, path, _ in _OUTSIDE.findall(Path(page.abs_src_path).read_text(encoding="utf-8")):
            if not (root / path).exists():
                _log.warning("%s links to %s, which does not exist", page.src_uri, path)
            elif picture:
                shown.add(path)
    return shown


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links that lead somewhere from the site; called by mkdocs for each page."""
    repository = f"{config['extra']['repository']}/blob/main/"

    def target(found: re.Match[str]) -> str:
        picture, text, path, place = found.groups(default="")
        return f"{picture}[{text}]({'' if picture else repository}{path}{place})"

    return _OUTSIDE.sub(target, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn of a page that loads something from elsewhere; called by mkdocs with each page's HTML."""
    for found in _LOADED.finditer(output):
        _log.warning("%s loads %s", page.file.src_uri, found[1] or found[2])
    return output

"""For `make site`: links to files outside docs/ lead to the repository, and pictures there are shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures that pages show; called by mkdocs once."""
    from mkdocs.structure.files import File

    root = Path(config["docs_dir"]).parent
    shown = {
        path
        for page in files.documentation_pages()
        for picture, _, path in _OUTSIDE.findall(Path(page.abs_src_path).read_text(encoding="utf-8"))
        if picture
    }
    for path in sorted(shown):
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links that lead somewhere from the site; called by mkdocs for each page."""

    repository = f"{config['repo_url']}/blob/main/"

    def there(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({'' if picture else repository}{path})"

    return _OUTSIDE.sub(there, markdown)

"""The server's page on the demo model in headless Chromium, and the screenshots of the docs. Run by hand.

    python benchmarks/serve_page.py [--out docs/serving]

The walk over every control is tests/serve/test_page.py.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import Browser, Page, chromium  # noqa: E402


def served(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a server in a process of its own, and return its address."""
    command = [sys.executable, "-m", "kvsieve", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+:\d+", line):
            return process, found[0].rstrip(";")
    raise SystemExit("the server did not start")


def ask(page: Page, text: str) -> None:
    page.click("#message")
    page.type(text)
    page.press("Enter")
    page.wait("document.getElementById('send').hidden")
    page.wait("!document.getElementById('send').hidden")
    assert "answered" in page.text("#status").lower(), page.text("#status")


def play(page: Page, url: str, out: Path) -> None:
    """Ask about a document under two plans, and take the picture of docs/serving.md."""
    page.open(url)
    page.wait("!document.getElementById('method-0').disabled")
    page.click("#settings-open")
    page.fill("#max_tokens", "40")
    page.click("#settings-close")
    minutes = (ROOT / "examples" / "minutes.txt").read_text(encoding="utf-8")
    page.hand_over("#talk", {"minutes.txt": minutes}, "drop")
    page.wait_text("#documents", "tokens")
    page.click("#compare")
    ask(page, "What is the name of the dredger?")
    page.screenshot(out / "playground.png")
    assert not page.complaints(), page.complaints()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "serving")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    process, url = served([])
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(chromium(), Path(profile))
        try:
            play(browser.page(1100, 900), url, given.out)
        finally:
            browser.close()
            process.terminate()
            process.wait()
    print("the page works")


if __name__ == "__main__":
    main()

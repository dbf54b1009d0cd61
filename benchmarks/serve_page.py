"""The server's page in headless Chromium: what a user would click and type, and screenshots of it. Run by hand.

    python benchmarks/serve_page.py [--chromium /usr/bin/chromium] [--out docs/serving]

Needs `pip install playwright` and a Chromium; the server is started here, on the demo model.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

TIMEOUT = 300_000


def served(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-m", "kvsieve", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+:\d+", line):
            return process, found[0].rstrip(";")
    raise SystemExit("the server did not start")


def play(page: Page, url: str, out: Path) -> None:
    """One conversation of two turns, by the keyboard alone, then the operator's view."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: request.url.startswith(url) or complaints.append(f"fetched {request.url}"))
    page.goto(url)
    expect(page.locator(".method").first).to_have_value("full")
    document = Path(__file__).parent.parent / "examples" / "minutes.txt"
    page.set_input_files("#file", document)
    page.fill("#tokens", "24")
    page.focus("#message")
    page.keyboard.type("Why is the dredging of the east channel late?")
    page.keyboard.press("Enter")
    expect(page.locator("#said")).to_have_text("Both have answered", timeout=TIMEOUT)
    for side in page.locator(".side").all():
        expect(side.locator(".facts")).to_contain_text("KV held")
        assert side.locator(".assistant").inner_text().strip()
        assert side.locator(".map i").count() == 120
    shares = [side.get_attribute("aria-label") for side in page.locator(".map").all()]
    assert "100 %" in (shares[0] or "") and "100 %" not in (shares[1] or ""), shares
    page.screenshot(path=out / "playground.png")
    page.keyboard.type("And when is the next meeting?")
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#send")).to_be_enabled(timeout=TIMEOUT)
    assert page.locator(".side").first.locator(".user").count() == 2
    page.focus("#tab-play")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#counts")).to_contain_text("answered", timeout=TIMEOUT)
    expect(page.locator("#nodes tr").nth(1)).to_be_visible(timeout=TIMEOUT)
    page.screenshot(path=out / "operator.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.keyboard.press("ArrowLeft")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390, f"{wide} pixels wide on a phone of 390"
    page.screenshot(path=out / "phone.png")
    assert not complaints, complaints


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "serving")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    process, url = served(["--method", "snapkv", "--budget", "20%", "--set", "paper=true"])
    try:
        with sync_playwright() as play_:
            browser = play_.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
            play(browser.new_page(viewport={"width": 1000, "height": 860}), url, given.out)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    print("the page works")


if __name__ == "__main__":
    main()

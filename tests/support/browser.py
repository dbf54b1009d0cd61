"""Headless Chromium, driven by its own protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
# Key: code, number, text.
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
}


def chromium() -> str:
    """Return the browser's program; skips the test without one, or fails it where KVSIEVE_REQUIRE_BROWSER is 1."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("KVSIEVE_REQUIRE_BROWSER") == "1":
            pytest.fail("KVSIEVE_REQUIRE_BROWSER=1, but none of chromium, chromium-browser, google-chrome is installed")
        pytest.skip("no Chromium is installed")
    return found


class Browser:
    """A browser process. Messages end with a zero byte; those without an id are events."""

    def __init__(self, program: str, profile: Path) -> None:
        ends = [*os.pipe(), *os.pipe()]
        # The shell below opens 3 and 4, so none of these may have such a number.
        reads, self._out, self._in, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends)
        for end in ends:
            os.close(end)
        command = f'exec "$@" 3</dev/fd/{reads} 4>/dev/fd/{writes}'
        arguments = [program, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["sh", "-c", command, "sh", *arguments],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._numbers, self._rest = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        named = {} if session is None else {"sessionId": session}
        data = json.dumps({"id": number, "method": method, "params": parameters, **named}).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            message = self._message()
            if message.get("id") != number:
                self.events.append(message)
            elif "error" in message:
                raise AssertionError(f"{method}: {message['error']}")
            else:
                return message["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, "Chromium does not answer"
            self._rest += data
        data, _, self._rest = self._rest.partition(b"\0")
        return json.loads(data)

    def page(self, width: int = 1100, height: int = 800) -> Page:
        """Open an empty page with a storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        made = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            made.call(f"{domain}.enable")
        made.call("Page.bringToFront")
        made.call("Emulation.setFocusEmulationEnabled", enabled=True)
        made.size(width, height)
        return made

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)


class Page:
    """One page. Selectors are CSS; clicks and keys come from the browser as a user's do."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        """Go to an address, and wait until all of it is there."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Evaluate an expression, a promise's outcome included."""
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            # An expression fails while one document gives way to the next.
            with contextlib.suppress(AssertionError):
                if self.js(f"Boolean({expression})"):
                    return
            time.sleep(0.02)
        shown = self.js("document.body.innerText.slice(0, 2000)")
        raise AssertionError(f"never true: {expression}; the page shows {shown!r}; {self.complaints()}")

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def wait_text(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        self.wait(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    def box(self, selector: str) -> dict[str, float]:
        """Return the edges of an element in the window."""
        return self.js(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, which must not be covered."""
        name = json.dumps(selector)
        self.wait(f"document.querySelector({name})?.getClientRects().length")
        self.js(f"document.querySelector({name}).scrollIntoView({{block: 'nearest'}})")
        box = self.box(selector)
        x, y = (box["left"] + box["right"]) / 2, (box["top"] + box["bottom"]) / 2
        hit = f"document.querySelector({name}).contains(document.elementFromPoint({x}, {y}))"
        assert self.js(hit), f"{selector} is covered at {x}, {y}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, number, text = KEYS[key]
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def fill(self, selector: str, text: str) -> None:
        """Write into a field in place of what it has, and leave it."""
        name = json.dumps(selector)
        self.js(f"document.querySelector({name}).focus(); document.querySelector({name}).value = ''")
        if text:
            self.type(text)
        self.js(f"document.querySelector({name}).dispatchEvent(new Event('change', {{bubbles: true}}))")

    def choose(self, selector: str, value: str) -> None:
        name = json.dumps(selector)
        self.js(
            f"(() => {{ const list = document.querySelector({name}); list.value = {json.dumps(value)}; "
            "list.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def hand_over(self, selector: str, files: dict[str, str], event: str) -> None:
        """Drop files on an element, or choose them in a field of files (event: "drop" or "change")."""
        self.js(
            f"""(() => {{
              const data = new DataTransfer(), place = document.querySelector({json.dumps(selector)});
              for (const [name, text] of Object.entries({json.dumps(files)})) data.items.add(new File([text], name));
              if ({json.dumps(event)} === "change") place.files = data.files;
              const how = {{ bubbles: true, cancelable: true, dataTransfer: data }};
              place.dispatchEvent(new DragEvent({json.dumps(event)}, how));
            }})()"""
        )

    def names(self) -> list[tuple[str, str]]:
        """Return role and name of everything that a screen reader meets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        told = [(each.get("role", {}).get("value", ""), each.get("name", {}).get("value", "")) for each in nodes]
        return [each for each, node in zip(told, nodes, strict=True) if not node["ignored"]]

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Return errors of scripts and refusals by the page's policy so far."""
        found = []
        for event in self._events():
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["source"] in (
                "security",
                "violation",
            ):
                found.append(event["params"]["entry"]["text"])
        return found

    def fetched(self) -> set[str]:
        """Return the addresses that were asked for so far."""
        sent = [each for each in self._events() if each["method"] == "Network.requestWillBeSent"]
        return {each["params"]["request"]["url"] for each in sent}

    def _events(self) -> Iterator[dict[str, Any]]:
        self.js("0")
        return (each for each in self.browser.events if each.get("sessionId") == self.session)

"""The chat page: its files, and a walk over every control in headless Chromium."""

from __future__ import annotations

import re
import threading

import httpx
import pytest
from fastapi import FastAPI

from browser import Browser, chromium
from kvsieve.serve.run import ServerOptions, application
from scripted_server import ScriptedServer, usage
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer

LAST = ".turn:last-child "
FIRST, SECOND = f"{LAST}.answer:first-child ", f"{LAST}.answer:last-child "


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(chromium(), tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def server():
    return ScriptedServer()


@pytest.fixture
def url(server):
    """Below a path, as a proxy may have it."""
    proxy = FastAPI()
    proxy.mount("/llm", server.app)
    with listening(proxy) as address:
        yield f"{address}/llm"


@pytest.fixture
def page(browser, url):
    made = browser.page()
    made.open(url)
    made.wait("!document.getElementById('method-0').disabled")
    yield made
    assert made.complaints() == []
    assert all(each.startswith((url, "data:", "about:")) and "metrics" not in each for each in made.fetched())


def ask(page, text):
    page.click("#message")
    page.type(text)
    page.press("Enter")


def ended(page, said="Answered"):
    page.wait(
        f"document.getElementById('status').innerText.includes({said!r}) && !document.getElementById('send').hidden"
    )


def messages(body):
    return [(each["role"], each["content"]) for each in body["messages"]]


def test_all_parts_of_the_page_are_its_own(url):
    page = httpx.get(f"{url}/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    left, seen = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text), set()
    assert len(left) == 3 and "http" not in re.sub(r"<!--.*?-->", "", page.text)
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        part = httpx.get(f"{url}/{name}")
        assert part.status_code == 200, name
        assert part.headers["content-type"].startswith(
            {"js": "text/javascript", "css": "text/css"}[name.split(".")[-1]]
        )
        assert len(part.text.splitlines()) <= 300, name
        left += [f"page/{each}" for each in re.findall(r'from "\./([^"]+)"', part.text)]
    assert {"page/main.js", "page/markdown.js", "page/graphs.js"} < seen


def test_a_message_waits_for_the_list_of_plans(server, url, browser):
    server.open.clear()
    server.methods = ["snapkv", "full"]
    page = browser.page()
    page.open(url)
    ask(page, "Which plan?")
    page.wait_text("#status", "Connecting")
    assert server.asked == [] and page.js("document.getElementById('message').value") == "Which plan?"
    server.open.set()
    ended(page)
    assert [each["kv"]["method"] for each in server.asked] == ["snapkv"]
    assert page.text(f"{LAST}.plan") == "snapkv" and page.text(f"{LAST}.body") == "Yes."
    assert page.js("document.activeElement.id") == "message"


def test_how_answers_end_is_said(server, page):
    going = threading.Event()
    server.script = lambda body: ["One ", "two ", going, "three"]
    page.click("#compare")
    ask(page, "Count.")
    page.wait_text(f"{SECOND}.body", "two")
    page.wait_text(f"{FIRST}.body", "two")
    assert page.js("document.getElementById('send').hidden")
    page.click("#stop")
    ended(page, "Stopped")
    going.set()
    assert "has answered" not in page.text("#status") and "Both" not in page.text("#status")
    assert page.text(f"{FIRST}.error") == "Stopped." and page.text(f"{FIRST}.body") == "One two"
    server.script = lambda body: [RuntimeError("out of memory")] if body["kv"]["method"] == "full" else ["Fine."]
    ask(page, "Again.")
    ended(page, "failed")
    assert page.text("#status") == "full failed: out of memory; rocketkv-mt has answered"
    assert page.text(f"{FIRST}.error") == "out of memory"
    # The stopped answer is part of the conversation, the failed one is not.
    assert ("assistant", "One two ") in messages(server.asked[-1])
    server.script = lambda body: ["Yes."]
    ask(page, "Third.")
    ended(page, "Both have answered")
    roles = {body["kv"]["method"]: [role for role, _ in messages(body)] for body in server.asked[-2:]}
    assert roles["full"] == ["user", "assistant", "user"]
    assert roles["rocketkv-mt"] == ["user", "assistant"] * 2 + ["user"]


def test_a_key_is_asked_for_in_sight(server, url, browser):
    server.key = "secret"
    page = browser.page(390, 844)
    page.open(url)
    page.wait_text("#alert", "an API key is needed")
    assert page.box("#alert")["top"] >= 0 and page.box("#key")["bottom"] < 200
    assert page.js("document.activeElement.id") == "key"
    page.type("wrong")
    page.press("Enter")
    page.wait_text("#alert", "an API key is needed")
    page.fill("#key", "secret")
    page.click("#access button")
    page.wait("document.getElementById('access').hidden && document.getElementById('alert').hidden")
    ask(page, "Now?")
    ended(page)
    assert len(server.asked) == 1


def test_two_plans_are_compared_word_by_word(server, page):
    answers = {"full": "The port is **open** on Monday.", "rocketkv-mt": "The port is **shut** on Monday."}
    server.script = lambda body: [answers[body["kv"]["method"]], usage(10, 7)]
    assert page.js("document.querySelectorAll('.plan-choice:not([hidden])').length") == 1
    page.click("#compare")
    chosen = [page.js(f"document.getElementById('method-{pane}').value") for pane in (0, 1)]
    assert chosen == ["full", "rocketkv-mt"]
    page.fill("#budget-1", "20%")
    ask(page, "Is it open?")
    ended(page, "Both have answered")
    assert [each["kv"].get("budget") for each in sorted(server.asked, key=lambda b: b["kv"]["method"])] == [None, "20%"]
    assert page.text(f"{SECOND}.badge") == "differs from full at word 4"
    assert page.js("[...document.querySelectorAll('mark')].map(each => each.textContent)") == ["shut"]
    assert page.js(f"document.querySelectorAll('{FIRST}mark').length") == 0
    assert abs(page.box(f"{FIRST}.body")["top"] - page.box(f"{SECOND}.body")["top"]) < 10
    answers["rocketkv-mt"] = answers["full"]
    page.click(f"{SECOND}.tools .idle")
    page.wait_text(f"{SECOND}.badge", "= full")
    assert page.js("document.querySelectorAll('mark').length") == 0
    page.choose("#method-0", "snapkv")
    page.choose("#method-1", "full")
    answers["snapkv"] = "The port is **open** on Monday. And on Tuesday."
    ask(page, "And now?")
    page.wait_text(f"{FIRST}.badge", "differs from full at word 7")
    assert page.js("[...document.querySelectorAll('mark')].map(each => each.textContent)") == ["And on Tuesday."]
    page.click("#compare")
    ask(page, "One?")
    ended(page)
    assert page.js(f"document.querySelectorAll('{LAST}.answer').length") == 1


MARKDOWN = """# Title
Some *soft*, **hard** and `code`, snake_case_name, 2 * 3 * 4, a [link](https://example.org/a_(b)) and <b>no bold</b>.
A [bad one](javascript:alert(1)) and ![image](https://example.org/x.png). See https://example.org/end.

1. first
   - inner
2. second

> quoted

| a | b |
|---|---|
| 1 | **2** |

```python
print("<script>")
```
~~~
open end"""


def test_markdown_is_shown_and_html_is_not(server, page):
    server.script = lambda body: [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
    ask(page, "Write.")
    ended(page)

    def found(selector):
        return page.js(f"[...document.querySelectorAll('{LAST}.body {selector}')].map(each => each.textContent)")

    assert found("h3") == ["Title"] and found("em") == ["soft"] and found("strong") == ["hard", "2"]
    assert found(":not(pre) > code") == ["code"]
    assert [found(each) for each in ("b", "script", "img")] == [[]] * 3
    assert found("a") == ["link", "image", "https://example.org/end"]
    links = page.js(f"[...document.querySelectorAll('{LAST}.body a')].map(each => each.href + ' ' + each.rel)")
    assert links[0] == "https://example.org/a_(b) noopener noreferrer"
    shown = page.text(f"{LAST}.body")
    assert "<b>no bold</b>" in shown and "snake_case_name, 2 * 3 * 4" in shown and "[bad one](javascript:" in shown
    assert found("ol > li > ul > li") == ["inner"] and len(found("ol > li")) == 2 and found("blockquote") == ["quoted"]
    assert found("td") == ["1", "2"] and found("pre") == ['print("<script>")', "open end"]
    page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(f"{LAST}.code-head button")
    page.wait("window.copied === 'print(\"<script>\")'")
    page.wait_text(f"{LAST}.code-head button", "Copied")
    page.click(f"{LAST}.answer > .tools button")
    page.wait("window.copied.startsWith('# Title')")
    page.click(f"{LAST}.user button")
    page.wait("window.copied === 'Write.'")


def test_messages_are_edited_and_conversations_kept(server, page, url):
    server.script = lambda body: [f"answer to {body['messages'][-1]['content']}"]
    for text in ("first", "second"):
        ask(page, text)
        ended(page)
    page.click(".turn:first-child .user button[aria-label='Edit message']")
    assert page.js("document.activeElement.value") == "first"
    page.press("Escape")
    page.click(".turn:first-child .user button[aria-label='Edit message']")
    page.fill(".turn:first-child .user textarea", "changed")
    page.press("Enter")
    page.wait_text(f"{LAST}.body", "answer to changed")
    ended(page)
    assert page.js("document.querySelectorAll('.turn').length") == 1
    assert messages(server.asked[-1]) == [("user", "changed")]
    page.click(f"{LAST}.tools .idle[aria-label^='Regenerate']")
    ended(page)
    page.wait("document.querySelectorAll('.turn').length === 1")
    page.press("Enter", shift=True)
    assert page.js("document.getElementById('message').value") == "\n" and len(server.asked) == 4
    page.click("#menu")
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    page.fill("#message", "")
    ask(page, "another")
    ended(page)
    page.open(f"{url}/?again")
    page.click("#menu")
    kept = "[...document.querySelectorAll('#list button:first-child')].map(each => each.textContent)"
    page.wait(f"{kept}.join() === 'another,first'")
    page.click("#list li:last-child button:first-child")
    page.wait_text(f"{LAST}.body", "answer to changed")
    ask(page, "third")
    ended(page)
    assert [text for _, text in messages(server.asked[-1])] == ["changed", "answer to changed", "third"]
    page.click("#menu")
    page.click("#list li:first-child button:last-child")
    page.wait(f"{kept}.join() === 'another' && document.querySelectorAll('.turn').length === 0")
    page.js("window.confirm = () => true")
    page.click("#settings-open")
    page.click("#forget-all")
    page.wait(f"{kept}.join() === '' && localStorage.getItem('kvsieve.conversations') === null")


def test_documents_are_dropped_and_counted(server, page):
    page.hand_over("#talk", {"a.txt": "one two three"}, "drop")
    page.wait_text("#documents", "a.txt (3 tokens)")
    page.hand_over("#file", {"b.md": "four five", "c.bin": ""}, "change")
    page.wait_text("#documents", "b.md (2 tokens)")
    page.wait_text("#documents", "c.bin: empty")
    page.click("#message")
    page.type("what is this")
    page.wait_text("#context", "Context: 8 of 200 tokens, 192 left")
    page.click("#documents li:nth-child(2) button")
    page.wait_text("#context", "Context: 6 of 200 tokens, 194 left")
    server.script = lambda body: ["A text.", usage(20, 5)]
    page.click("#send")
    ended(page)
    assert messages(server.asked[-1]) == [("user", "one two three\n\nwhat is this")]
    assert page.text(f"{LAST}.user .documents") == "a.txt (3 tokens)" and page.text("#documents") == ""
    assert page.text("#context") == "Context: 25 of 200 tokens, 175 left"
    page.hand_over("#talk", {"long.txt": "word " * 300}, "drop")
    page.wait_text("#context", "125 too many")


def test_any_answer_is_made_again(server, page):
    server.script = lambda body: [f"answer {len(server.asked)}"]
    for text in ("first", "second", "third"):
        ask(page, text)
        ended(page)
    again = ".turn:nth-child(2) .tools .idle[aria-label^='Regenerate']"
    page.js("window.confirm = (text) => { window.warned = text; return false; }")
    page.click(again)
    page.wait("window.warned === 'Answer this message anew, and delete the message after it?'")
    page.wait("!document.getElementById('send').hidden")
    assert len(server.asked) == 3 and page.js("document.querySelectorAll('.turn').length") == 3
    page.js("window.confirm = () => true")
    page.click(again)
    page.wait_text(f"{LAST}.body", "answer 4")
    ended(page)
    assert page.js("document.querySelectorAll('.turn').length") == 2
    assert [text for _, text in messages(server.asked[-1])] == ["first", "answer 1", "second"]


def test_the_context_left_counts_what_no_answer_has_counted(server, page):
    going = threading.Event()
    page.click("#settings-open")
    page.fill("#system", "be very brief")
    page.click("#settings-close")
    page.hand_over("#talk", {"a.txt": "one two three"}, "drop")
    page.wait_text("#context", "Context: 6 of 200 tokens")
    server.script = lambda body: ["One ", "two ", going, "three"]
    ask(page, "what is this")
    page.wait_text(f"{LAST}.body", "two")
    page.click("#stop")
    ended(page, "Stopped")
    going.set()
    # The system prompt, the document, the question and what came of the answer.
    assert page.text("#context") == "Context: 11 of 200 tokens, 189 left"
    page.hand_over("#talk", {"b.txt": "four five"}, "drop")
    page.wait_text("#context", "Context: 13 of 200 tokens, 187 left")
    server.script = lambda body: [RuntimeError("out of memory")]
    ask(page, "and this")
    ended(page, "failed")
    assert page.text("#context") == "Context: 11 of 200 tokens, 189 left"
    server.script = lambda body: ["Three.", usage(40, 2)]
    ask(page, "once more")
    ended(page)
    assert page.text("#context") == "Context: 42 of 200 tokens, 158 left"


def test_settings_are_sent_and_kept(server, page, url):
    page.click("#settings-open")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "top_k": "7", "max_tokens": "9"}.items():
        page.fill(f"#{name}", value)
    page.fill("#top_p", "7")
    page.click("#settings-close")
    assert page.js("document.getElementById('settings').open")
    page.press("Escape")
    page.wait("!document.getElementById('settings').open && document.getElementById('top_p').value === ''")
    ask(page, "Well?")
    ended(page)
    body = server.asked[-1]
    assert messages(body) == [("system", "Be brief."), ("user", "Well?")]
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.5, 7, 9) and "top_p" not in body
    page.open(f"{url}/?again")
    page.wait("document.getElementById('system').value === 'Be brief.'")
    page.click("#settings-open")
    page.click("#defaults")
    page.click("#settings-close")
    ask(page, "And now?")
    ended(page)
    assert messages(server.asked[-1]) == [("user", "And now?")] and "temperature" not in server.asked[-1]


def test_prefill_costs_and_the_map_are_shown(server, page):
    reading, writing = threading.Event(), threading.Event()
    progress = {"prompt_progress": {"total": 80, "cache": 0, "processed": 20, "time_ms": 5}}
    server.script = lambda body: [reading, progress, writing, "Done.", usage(80, 11, notes=["kept all"], map=[1.0] * 7)]
    ask(page, "Read.")
    page.wait_text(f"{LAST}.progress", "Waiting for the server")
    reading.set()
    page.wait_text(f"{LAST}.progress", "Prefilling: 20 of 80 tokens")
    assert page.js(f"document.querySelector('{LAST}progress').value") == 0.25
    writing.set()
    ended(page)
    facts = page.text(f"{LAST}.facts")
    for fact in (
        "10.0 tokens/s",
        "11 tokens",
        "4.0 KiB of KV",
        "80 of 80 entries kept",
        "3 prompt tokens from the store",
    ):
        assert fact in facts
    assert page.text(f"{LAST}.notes") == "Note: kept all" and page.js(
        f"document.querySelector('{LAST}.progress').hidden"
    )
    # All was kept, so no column of the map is paler than another.
    pixels = f"[...document.querySelector('{LAST}.map').getContext('2d').getImageData(0, 0, 7, 1).data]"
    assert page.js(f"{pixels}.filter((_, at) => at % 4 === 3)") == [255] * 7
    assert "100 %" in page.js(f"document.querySelector('{LAST}.map').getAttribute('aria-label')")


def test_reasoning_is_folded_above_the_answer_and_calls_are_text(server, page):
    def delta(**members):
        return {"choices": [{"index": 0, "delta": members, "finish_reason": None}]}

    begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
    call = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    thinking = threading.Event()
    server.script = lambda body: [
        delta(reasoning_content="Two and "),
        thinking,
        delta(reasoning_content="two."),
        "Four.",
        delta(tool_calls=[begun]),
        delta(tool_calls=[call]),
    ]
    ask(page, "How many?")
    page.wait(f"document.querySelector('{LAST}.reasoning:not([hidden]) p').textContent === 'Two and '")
    assert page.js(f"document.querySelector('{LAST}.progress').hidden")
    thinking.set()
    ended(page)
    assert page.text(f"{LAST}.body") == 'Four.\n\nadd {"a": 1}'
    folded = f"document.querySelector('{LAST}.reasoning')"
    assert page.js(f"{folded}.textContent") == "ReasoningTwo and two." and not page.js(f"{folded}.open")
    assert page.box(f"{LAST}.reasoning")["bottom"] <= page.box(f"{LAST}.body")["top"]
    page.click(f"{LAST}.reasoning summary")
    assert page.js(f"{folded}.open") and page.text(f"{LAST}.reasoning p") == "Two and two."
    server.script = lambda body: ["Yes."]
    ask(page, "Sure?")
    ended(page)
    assert messages(server.asked[-1])[1] == ("assistant", 'Four.\n\nadd {"a": 1}')
    assert page.js(f"document.querySelector('{LAST}.reasoning').hidden")


def test_the_last_line_is_in_sight_on_a_phone(server, page):
    page.size(390, 844)
    server.script = lambda body: [*(f"line {number}\n\n" for number in range(60)), usage(9, 9, notes=["a note"] * 9)]
    ask(page, "Long?")
    ended(page)
    assert page.js(f"document.querySelector('{LAST}.answer > .tools').getClientRects().length") == 1
    assert page.js("document.getElementById('talk').scrollHeight") > 1500
    talk, map_ = page.box("#talk"), page.box(f"{LAST}.map")
    page.wait(f"document.querySelector('{LAST}.answer > .tools').getBoundingClientRect().bottom <= {talk['bottom']}")
    assert talk["height"] > 400 and page.box("#send")["bottom"] <= 844 and map_["width"] > 300
    page.click("#compare")
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.click("#menu")
    assert page.box("#conversations")["right"] < 390
    page.click("#new")
    page.wait("getComputedStyle(document.getElementById('conversations')).display === 'none'")


def test_the_operator_sees_the_last_minutes(server, page):
    ask(page, "Work.")
    ended(page)
    page.js("document.getElementById('tab-chat').focus()")
    page.press("ArrowRight")
    page.wait("document.activeElement.id === 'tab-operate' && document.getElementById('chat').hidden")
    page.wait("/Tokens per second: [1-9]/.test(document.getElementById('graphs').innerText)")
    graphs = page.text("#graphs")
    assert "Running answers: 1" in graphs and "Waiting requests: 3" in graphs and "KV memory: 1.0 MiB" in graphs
    labels = page.js("[...document.querySelectorAll('#graphs svg')].map(each => each.getAttribute('aria-label'))")
    assert len(labels) == 5 and all("over the last 5 minutes: " in each for each in labels)
    page.wait("[...document.querySelectorAll('polyline')].every(each => each.getAttribute('points').includes(' '))")
    page.wait_text("#counts", "answered\t7")
    page.wait_text("#memory-text", "1.0 MiB of 4.0 MiB reserved")
    page.wait_text("#nodes", "abcdefgh")
    page.click("#tab-chat")
    page.wait("!document.getElementById('chat').hidden && document.getElementById('operate').hidden")


def test_a_keyboard_and_a_screen_reader_reach_everything(server, page):
    page.click("#compare")
    ask(page, "Speak.")
    ended(page, "Both")
    page.click("#settings-open")
    page.click("#settings-close")
    controls = {"button", "textbox", "combobox", "spinbutton", "tab", "image", "progressbar", "dialog", "region"}
    names = page.names()
    assert [each for each in names if each[0] in controls and not each[1].strip()] == []
    for known in (("button", "Send"), ("textbox", "Message"), ("combobox", "Second plan"), ("log", "Conversation")):
        assert known in names
    assert ("button", "Regenerate answer under full") in names
    page.js("document.getElementById('message').focus()")
    page.press("Tab")
    assert page.js("document.activeElement.id") == "attach"
    page.press("Tab")
    assert page.js("document.activeElement.id") == "send"
    light = page.js("getComputedStyle(document.body).color")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(f"getComputedStyle(document.body).color !== {light!r}")


def test_the_page_talks_with_the_server(browser):
    tokenizer = chat_tokenizer()
    with (
        application(build("llama"), tokenizer, ServerOptions(others=("rocketkv-mt",)), "tiny") as app,
        listening(app) as url,
    ):
        page = browser.page()
        page.open(url)
        page.hand_over("#talk", {"d.txt": "w1 w2 w3 " * 20}, "drop")
        page.wait_text("#documents", "d.txt (60 tokens)")
        page.click("#settings-open")
        page.fill("#max_tokens", "8")
        page.click("#settings-close")
        page.click("#compare")
        ask(page, "w4 w5")
        ended(page, "Both have answered")
        assert page.text(f"{SECOND}.plan b") == "rocketkv-mt" and page.text(f"{SECOND}.badge") != ""
        assert "of 65 entries kept" in page.text(f"{LAST}.facts"), page.text(f"{LAST}.facts")
        assert page.js(f"document.querySelector('{LAST}.map').width") == 120
        page.click("#tab-operate")
        page.wait_text("#graphs", "KV memory")
        page.wait_text("#counts", "answered\t2")
        assert page.complaints() == []

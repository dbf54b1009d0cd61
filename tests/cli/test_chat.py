"""`kvsieve chat`: turns from a pipe, and a terminal with a person who interrupts."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from rich.cells import cell_len

import kvsieve
from kvsieve.cli.main import run_cli
from kvsieve.cli.words import Words
from kvsieve.errors import InputError
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer
from unreadable import forbid

NEW = "9"
FIRST = " ".join(f"w{i % 80}" for i in range(100))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model that never ends an answer itself."""
    folder = tmp_path_factory.mktemp("llama")
    model = build("llama", max_position_embeddings=1024)
    model.generation_config.suppress_tokens = [0, 1, 2, 127]
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def talk(capsys, monkeypatch, model_dir):
    """Pipe lines into the command in this process: (exit code, stdout, stderr)."""

    def call(text: str | bytes, *options: str) -> tuple[int, str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            given = ("chat", model_dir, "--max-new-tokens", NEW, "--dtype", "float32", *options)
            run_cli([str(each) for each in given])
        out = capsys.readouterr()
        assert "Traceback" not in out.out + out.err
        return left.value.code, out.out, out.err

    return call


@pytest.fixture(scope="module")
def saved_files(model_dir, tmp_path_factory):
    """A directory with a saved cache, and a chat that was saved after one turn."""
    folder = tmp_path_factory.mktemp("saved")
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=8), tokenizer=tokenizer) as sieve:
        chat = sieve.chat(tokenizer, "w7", max_new_tokens=int(NEW))
        chat.ask(FIRST)
        chat.save(folder / "chat")
        sieve.save(chat.cache, folder / "cache")
    return folder


def answers(model_dir, *messages: str, method: str = "full", **options) -> list[str]:
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    with kvsieve.attach(model, kvsieve.plan(method, **options), tokenizer=tokenizer) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=int(NEW))
        return [chat.ask(message).text for message in messages]


def only_error(result, code: int) -> str:
    got, out, err = result
    assert got == code and err.count("error:") == 1 and len(err.splitlines()) == 1, err
    assert out == ""
    return err


def test_a_turn_per_line(talk, model_dir):
    code, out, err = talk("w1 w2\n\n   \nw3\r\nw4")
    assert code == 0 and out.splitlines() == answers(model_dir, "w1 w2", "w3", "w4")
    costs = err.splitlines()
    assert len(costs) == 3 and ">" not in out and "\x1b" not in out + err
    assert re.fullmatch(
        r"\[9 tokens, first after [\d.]+ s, [\d.]+ tokens/s, 13 of 13 entries kept, \d+ read per step\]", costs[0]
    )


def test_drafts_leave_the_answers_and_are_told_per_turn(talk, model_dir):
    _, out, err = talk("w1 w2\nw3\n/stats\n", "--commands", "--draft", "lookup:ngram=1:adapt=false")
    assert out.splitlines() == answers(model_dir, "w1 w2", "w3")
    told = [line for line in err.splitlines() if line.startswith("drafts: ")]
    assert len(told) == 4 and told[2:] == [told[at].replace("drafts: ", f"drafts: turn {at + 1}: ") for at in (0, 1)]


def test_nothing_said_is_nothing_done(talk):
    assert talk("") == (0, "", "")


def test_methods_files_and_system_prompts(talk, model_dir, tmp_path):
    file = tmp_path / "context.txt"
    file.write_text(FIRST + "\n")
    code, out, err = talk(
        "w1\nw2\n/stats wide\n",
        "--commands",
        "--method",
        "snapkv",
        "--budget",
        "40",
        "--file",
        file,
        "--set",
        "window=8",
    )
    wanted = answers(model_dir, FIRST + "\n\nw1", "w2", method="snapkv", budget=40, window=8)
    assert code == 0 and out.splitlines() == wanted
    assert err.splitlines()[0].startswith("warning: budget 40 keeps 40 entries")
    assert "48 of 112 entries kept" in err.splitlines()[1]
    row = next(line.split() for line in err.splitlines() if line.split()[:1] == ["2"])
    assert row[1:3] == ["118", "9"] and row[5] == "40" and row[-1] == "yes"
    assert talk("w1\n", "--system", "w7 w8")[1] != talk("w1\n")[1]


def test_json_is_a_line_per_turn(talk, model_dir):
    code, out, err = talk("w1\nw2\n", "--json")
    turns = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == "" and [each["message"] for each in turns] == ["w1", "w2"]
    assert [each["answer"] for each in turns] == answers(model_dir, "w1", "w2")
    assert not turns[0]["ended"] and turns[1]["stats"]["prompt_tokens"] == 18
    # A byte order mark is no part of a message.
    assert json.loads(talk("\ufeffw1\n", "--json")[1])["message"] == "w1"


def test_commands(talk, model_dir):
    code, out, err = talk("w1\nw5\n/undo\nw2\n/help\n/kept w2\n/kept\n/quit\nw3\n", "--commands")
    assert all(f"\n{group}:\n" in err for group in ("Last turn", "Look up", "Chat")) and "\n  /retry " in err
    asked = answers(model_dir, "w1", "w5"), answers(model_dir, "w1", "w2")
    assert code == 0 and out.splitlines() == [*asked[0], asked[1][1]]
    assert "the last turn is forgotten" in err and "/save FILE" in err
    assert re.search(r"'w2', token \d+ \(prompt\): 100% held; layers 0–3 whole", err) and "held by layer" in err


def test_edits(talk, model_dir, tmp_path):
    file = tmp_path / "chat.kv"
    lines = "w1 w2\nw3\nw4\n/replace 2 w5 w6\n/undo\n/replace 2 w7\n/remove 1\nw8\nw9\n/stats\n/strip 1\n/help\n"
    code, out, err = talk(lines, "--commands", "--save", file)
    asides = err.splitlines()
    assert code == 0 and out.splitlines()[:3] == answers(model_dir, "w1 w2", "w3", "w4")
    assert len(out.splitlines()) == 5 and "the last edit is undone" in asides
    for start in ("turn 2 replaced", "turn 1 removed", "stripped"):
        assert sum(bool(re.match(rf"{start}: \d+ tokens reused, \d+ of .* \d+ prefilled$", line)) for line in asides)
    told = [line for line in asides if line.startswith("edited: ")]
    assert re.match(r"edited: \d.* approximate \(edit:window=32\), \d+ tokens reused", told[0]) or "exact" in told[0]
    assert "edited: turn 3: " + told[0].removeprefix("edited: ") in told
    assert "  /replace N TEXT replace the message of turn N by TEXT; its answer stays" in asides
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        said = [message["content"] for message in sieve.chat(tokenizer, load=file).messages[::2]]
    assert said == ["w7", "w4", "w8", "w9"]
    for line, reason in (
        ("/remove 2", "/remove needs the number of a turn, 1 to 1 as /stats lists them, got '2'"),
        ("/remove", "got ''"),
        ("/remove 1", "only turn"),
        ("/replace 1", "/replace needs a turn's number and the new message"),
    ):
        code, _, err = talk(f"w1\n{line}\n", "--commands")
        assert code == 2 and reason in err


@pytest.mark.parametrize(
    ("lines", "opened", "said"),
    [
        ("w1\nw2\n/replace 1 w3\nw4\n", 0, ["w3", "w2", "w4"]),
        ("w1\nw2\n/replace 2 w3\nw4\n", 0, ["w1", "w3", "w4"]),
        ("w1\nw2\n/remove 1\nw4\n/remove 1\n/replace 1 w5\n", 0, ["w5"]),
        ("w1\nw2\n/remove 1\n/undo\nw4\n", 0, ["w1", "w2", "w4"]),
        ("w1\nw2\n/remove 1\nw4\n", 1, ["w2", "w4"]),
    ],
)
def test_edits_keep_the_text_of_the_file(talk, model_dir, tmp_path, lines, opened, said):
    (tmp_path / "text.txt").write_text("w8 w9")
    file = tmp_path / "chat.kv"
    assert talk(lines, "--commands", "--file", tmp_path / "text.txt", "--save", file)[0] == 0
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        found = [message["content"] for message in sieve.chat(tokenizer, load=file).messages[::2]]
    assert found == [f"w8 w9\n\n{text}" if at == opened else text for at, text in enumerate(said)]


def test_stats_fit_80_columns(talk):
    for asked, options in (("/stats", []), ("/stats wide", []), ("/stats", ["--wide"])):
        err = talk(f"w1\n{asked}\n", "--commands", *options)[2]
        header, row = (
            next(line for line in err.splitlines() if line.startswith(f" {first}")) for first in ("turn", "1 ")
        )
        wide = asked == "/stats wide" or bool(options)
        assert len(row.split()) == (9 if wide else 6) and ("KV MiB" in header) == wide
        assert wide or max(map(len, err.splitlines()[1:])) <= 80


def test_several_lines_are_one_message_where_commands_are(talk, model_dir):
    lines = 'w1 \\\nw2\n"""\nw3\n\n/w4\n"""\nw5\n'
    wanted = answers(model_dir, "w1 \nw2", "w3\n\n/w4", "w5")
    assert talk(lines, "--commands")[1].splitlines() == wanted
    turns = [json.loads(line) for line in talk(lines, "--json")[1].splitlines()]
    assert [each["message"] for each in turns] == lines.replace("\n\n", "\n").splitlines()


def test_retry_answers_the_last_message_again(talk, model_dir, tmp_path):
    options, file = ["--commands", "--json", "--temperature", "1", "--seed", "3"], tmp_path / "chat.kv"
    code, out, err = talk("w1\nw2\n/retry\n/retry\nw3\n/undo\n", *options, "--save", file)
    turns = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [each["message"] for each in turns] == ["w1", "w2", "w2", "w2", "w3"]
    assert len({each["answer"] for each in turns[1:4]}) > 1 and "greedy" not in err
    assert talk("w1\nw2\n/retry\n/retry\nw3\n", *options)[1].count(turns[4]["answer"]) == 1
    again = kvsieve.models.load(model_dir, "checkpoint")
    with kvsieve.attach(again[0], kvsieve.plan("full")) as sieve:
        said = [each["content"] for each in sieve.chat(again[1], load=file).messages]
    assert said == ["w1", turns[0]["answer"], "w2", turns[3]["answer"]]
    # A greedy answer comes out the same, of the document too; /undo takes back both.
    document = tmp_path / "document.txt"
    document.write_text(FIRST)
    code, out, err = talk("w1\n/retry\n/undo\nw1\n", "--commands", "--file", document)
    assert len(set(out.splitlines())) == 1 and len(out.splitlines()) == 3 and "note: answers are greedy" in err


def test_protected_tokens_stay(talk):
    options = ["--commands", "--method", "snapkv", "--budget", "60", "--set", "window=8", "--system", "w7"]
    shares = {}
    for given in ([], ["--protect", "system", "--protect", "4:9"]):
        err = talk(f"{FIRST}\n/kept w7\n/kept w0 w1 w2 w3 w4\n", *options, *given)[2]
        first = [re.search(rf"^'{text}', .*?: (\d+)% held", err, re.MULTILINE)[1] for text in ("w7", "w0 w1 w2 w3 w4")]
        shares[bool(given)] = first
    assert shares[True] == ["100", "100"] and "100" not in shares[False]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/undo", "there is none"),
        ("/nonsense w1", "unknown command /nonsense (commands are /retry, /undo, /remove, "),
        ("/remove 1", "the chat has no turn yet"),
        ("/strip w1", "/strip takes nothing, or a number of last turns that keep tool results, got 'w1'"),
        ("/strip", "the chat has no turn yet"),
        ("/stat", "unknown command /stat; did you mean '/stats'?"),
        ("/retry", "there is no turn to answer again"),
        ("/stats all", "/stats takes nothing, or wide for all columns, got 'all'"),
        ('"""\nw1', 'a block that begins with """ has no end'),
        ("/save", "/save needs a file"),
        ("w1 " * 1200, "this message adds 1203: with one token of an answer that is more than the model's context of"),
        (b"w1 \xff\n", "not UTF-8"),
    ],
)
def test_what_cannot_be_done_ends_a_pipe(talk, line, told):
    assert told in only_error(talk(line if isinstance(line, bytes) else f"{line}\nw2\n", "--commands"), 2)


def test_what_looks_like_a_command_is_text_in_a_pipe(talk, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["/save chat.kv", "/quit", "/nonsense"]
    code, out, err = talk("\n".join(lines))
    assert code == 0 and out.splitlines() == answers(model_dir, *lines) and list(tmp_path.iterdir()) == []


def test_only_files_that_kvsieve_saved_are_replaced(talk, saved_files, tmp_path, monkeypatch):
    document, empty = tmp_path / "document.txt", tmp_path / "empty"
    document.write_text(FIRST)
    empty.touch()
    load, loaded = kvsieve.models.load, []
    monkeypatch.setattr(kvsieve.models, "load", lambda *given, **how: loaded.append(given) or load(*given, **how))
    for options in ([], ["--file", document]):
        told = only_error(talk("w1\n", "--save", document, *options), 2)
        assert "no chat that kvsieve saved" in told and "--force" in told and not loaded
    code, out, err = talk(f"w1\n/save {document}\nw2\n", "--commands")
    assert code == 2 and "is no file that kvsieve saved" in err and len(out.splitlines()) == 1
    assert document.read_text() == FIRST
    # One that was damaged is kvsieve's still.
    damaged = tmp_path / "damaged"
    damaged.write_bytes((saved_files / "chat").read_bytes()[:100])
    for file, options in ((empty, []), (damaged, []), (document, ["--force"])):
        assert talk("w1\n", "--save", file, *options)[0] == 0
        assert talk("w2\n", "--load", file)[0] == 0


def test_the_library_replaces_only_what_it_saved(model_dir, tmp_path):
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    notes, saved = tmp_path / "notes", tmp_path / "saved"
    notes.write_text("mine")
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=2)
        chat.ask("w1")
        for save in (chat.save, lambda path: sieve.save(chat.cache, path)):
            save(saved)
            save(saved)
            with pytest.raises(InputError, match="no file that kvsieve saved"):
                save(notes)
        assert notes.read_text() == "mine"
        chat.save(notes, force=True)
        assert sieve.chat(tokenizer, load=notes).messages == chat.messages


def test_orders_to_a_terminal_are_written_out(talk, model_dir, monkeypatch, tmp_path):
    word, real = "\x1b[2J\u202e\x9b1m", kvsieve.detokenize.text_of
    monkeypatch.setattr(kvsieve.detokenize, "text_of", lambda *given: real(*given).replace("w", word))
    _, out, err = talk("w1\n")
    assert "\\x1b[2J\\u202e\\x9b1m" in out and not set("\x1b\x9b\u202e") & set(out + err)
    data = json.loads(talk("w1\n", "--json")[1])
    assert word in data["answer"]
    monkeypatch.undo()
    # What the header of a file says.
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    model.config._name_or_path = "evil\x1b]0;title\x07"
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=2)
        chat.ask("w1")
        chat.save(tmp_path / "chat")
    with kvsieve.attach(build("llama", hidden_size=32), kvsieve.plan("full")) as sieve:
        with pytest.raises(kvsieve.errors.CacheFileError, match=r"evil\\x1b\]0;title\\x07") as told:
            sieve.chat(tokenizer, load=tmp_path / "chat")
    assert not set("\x1b\x07") & set(str(told.value))


def test_who_watches_is_told_that_the_prompt_is_read(talk, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = talk(FIRST, "--chunk", "40")
    assert code == 0 and "\x1b" not in out
    # Gone before the answer begins.
    shown = err.split("\r\x1b[K")
    assert shown[1:3] == ["prefill ...", "prefill: 40 of 103 tokens"] and shown[-1].startswith(
        ("\x1b[2m[9 tokens", "[9")
    )


def test_a_pipe_is_told_once_that_a_long_prompt_is_prefilled(talk):
    code, out, err = talk(f"{FIRST}\nw1", "--chunk", "40")
    lines = err.splitlines()
    assert code == 0 and "\x1b" not in out + err and "\r" not in err
    assert lines[0] == "prefill: 40 of 103 tokens" and [line[:8] for line in lines[1:]] == ["[9 token"] * 2
    assert talk(f"{FIRST}\nw1", "--chunk", "40", "--json")[2] == ""


@pytest.mark.parametrize("width", [20, 21, 200])
def test_words_are_not_broken_at_a_lines_end(width):
    text = (
        "The quick brown fox jumps over the lazy dog.\n\n  - an item that is long\n"
        + "x" * 50
        + " end 你好世界你好世界 fin"
    )
    for size in (1, 2, 5, len(text)):
        words, shown = Words(width), ""
        for at in range(0, len(text), size):
            shown += words.add(text[at : at + size])
        shown += words.rest()
        assert shown.split() == text.split()
        for line in shown.split("\n"):
            assert cell_len(line) <= width or "x" * 20 in line
        if width == 200:
            assert shown == text
    assert Words(None).add(" a") == " a"


def test_an_answer_that_the_context_cuts_is_told(talk):
    code, out, err = talk("w1 " * 1015, "--method", "full")
    assert code == 0 and len(out.split()) == 6
    assert "note: the answer was cut at 6 tokens, where the model's context of 1024 ends" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method", "snapkv", "--budget", "1"], "at least 2"),
        (["--method", "snapvk"], "did you mean 'snapkv'?"),
        (["--dtype", "int8"], "'int8'"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--chunk", "0"], "--chunk must be at least 1"),
        (["--system", " "], "--system is empty"),
        (["--system", "w1", "--load", "x"], "leave --system out"),
        (["--file", "-"], "stdin"),
        (["--file", "nowhere"], "No such file"),
        (["--load", "cache"], "holds a cache but no chat"),
        (["--load", "chat", "--method", "knorm"], "was made under snapkv, not knorm"),
        (["--load", "chat", "--budget", "9"], "leave --budget, --set, --profile, --codec, --rest and --prefill out"),
        (["--save", "no/where/x"], "there is no directory"),
        (["--save", "."], "is a directory"),
    ],
)
def test_bad_options_fail_before_a_model_is_loaded(talk, monkeypatch, saved_files, options, told):
    monkeypatch.chdir(saved_files)
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert told in only_error(talk("w1\n", *options), 2)


def test_a_model_without_chat_template(capsys, monkeypatch, tmp_path):
    build("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("w1\n"))
    # Saving draws a bar of progress.
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_cli(["chat", str(tmp_path), "--dtype", "float32"])
    out = capsys.readouterr()
    assert left.value.code == 2 and out.out == "" and "no chat template" in out.err and len(out.err.splitlines()) == 1


def test_a_saved_chat_goes_on(talk, model_dir, saved_files, tmp_path):
    file, more = tmp_path / "chat.kv", tmp_path / "more.kv"
    asked = ["--method", "snapkv", "--budget", "40", "--set", "window=8", "--system", "w7"]
    _, whole, _ = talk(f"{FIRST}\nw2\nw3\n", *asked)
    code, out, err = talk(f"{FIRST}\n/save {more}\nw2\n", *asked, "--save", file, "--commands")
    assert code == 0 and f"saved to {more}" in err
    assert out.splitlines() == whole.splitlines()[:2]
    assert talk("w3\n", "--load", file)[1].splitlines() == whole.splitlines()[2:]
    for known in (more, saved_files / "chat"):
        assert talk("w2\nw3\n", "--load", known)[1].splitlines() == whole.splitlines()[1:]
    # /undo takes a turn back in the file too.
    assert talk("w9\n/undo\n", "--load", file, "--save", file, "--commands")[0] == 0
    assert talk("w3\n", "--load", file)[1].splitlines() == whole.splitlines()[2:]


def test_files_that_cannot_be_read_or_written(talk, saved_files, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged"
    damaged.write_bytes((saved_files / "chat").read_bytes()[:-1000])
    assert str(damaged) in only_error(talk("w1\n", "--load", damaged), 1)
    assert "No such file" in only_error(talk("w1\n", "--load", tmp_path / "none"), 2)
    assert "is not a file" in only_error(talk("w1\n", "--load", saved_files), 2)
    with monkeypatch.context() as patch:
        forbid(patch, saved_files / "chat")
        for options in (["--load"], ["--save"]):
            told = only_error(talk("w1\n", *options, saved_files / "chat"), 2)
            assert "Permission denied" in told and "No such file" not in told
    assert "plan" in only_error(talk("w1\n", "--load", saved_files / "chat", "--method", "snapkv"), 1)

    # A turn that could not be saved is told, and saved with the next one.
    file, real, calls = tmp_path / "chat.kv", os.replace, []

    def full_at_first(*given):
        calls.append(given)
        if len(calls) < 2:
            raise OSError(28, "No space left on device")
        real(*given)

    monkeypatch.setattr("os.replace", full_at_first)
    code, out, err = talk("w1\nw2\n", "--save", file)
    assert code == 0 and err.count("error: not saved: ") == 1 and "No space left" in err and file.exists()
    calls.extend([None] * 9)
    monkeypatch.setattr("os.replace", lambda *given: calls.clear() or full_at_first(*given))
    code, out, err = talk("w1\nw2\n", "--save", file)
    assert code == 1 and len(out.splitlines()) == 2 and err.count("error: not saved: ") == 3
    monkeypatch.undo()


def _in_front() -> None:
    """What a shell does for a command in the foreground; what runs the tests may itself ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`kvsieve chat` behind a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvsieve.cli.main", "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=_in_front,
        )
        os.close(slave)
        self.shown, self.looked = "", 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C and wait for a text.

        An interrupt between the prompt and readline's wait is seen only once a line has been read: Enter ends one.
        """
        self.type("\x03")
        self.expect(pattern, 1)

    def expect(self, pattern: str, silence: float = 240) -> str:
        """Wait until it is shown; what was shown before it. silence: seconds without a text before Enter is pressed."""
        end = time.monotonic() + 240
        while not (found := re.compile(pattern).search(self.shown, self.looked)):
            ready = select.select([self.master], [], [], silence)[0]
            if not ready and time.monotonic() < end:
                self.type("\r")
                continue
            try:
                read = os.read(self.master, 4096) if ready else b""
            except OSError:  # Linux's way to say that the other side is gone
                read = b""
            assert read, f"{pattern!r} was not shown: {self.shown[self.looked :]!r}"
            self.shown += read.decode(errors="replace")
        before, self.looked = self.shown[self.looked : found.start()], found.end()
        return before

    def ends(self) -> int:
        """Read to the end; the exit code. Enter as in `interrupt`."""
        end = time.monotonic() + 240
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                if not select.select([self.master], [], [], 1)[0]:
                    self.type("\r")
                elif read := os.read(self.master, 4096):
                    self.shown += read.decode(errors="replace")
                else:
                    break
        return self.process.wait(240)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.slow
def test_a_person_at_a_terminal(terminal, model_dir):
    shown = terminal(model_dir, "--max-new-tokens", "700", "--method", "snapkv", "--budget", "40")
    shown.expect(r"llama.*snapkv; /help lists")
    shown.expect("> ")
    shown.type("w1 w2 w3\r")
    shown.expect(r"(w\d+ ){8}")
    shown.type("\x03")
    shown.expect(r"stopped; the turn is forgotten")
    shown.expect("> ")
    shown.type("/undo\r")
    shown.expect(r"error: /undo forgets the last turn or edit of this session, once; there is none")
    shown.expect("> ")
    shown.type("w1 " * 1100 + "\r")
    shown.expect(r"error: .*more than the model's context of 1024")
    shown.expect("> ")
    shown.type("w9\r")
    # The turn that was stopped is not in the conversation.
    shown.expect(r"\[700 tokens, first after .* of 703 entries kept")
    shown.expect("> ")
    # Ctrl-C drops a message that is begun; pasted lines are one message.
    shown.type("w1 \\\r")
    shown.expect(r"\.\.\. ")
    shown.interrupt("the message is dropped")
    shown.expect("> ")
    shown.type("\x1b[200~w1 w2\rw3 w4\x1b[201~\r")
    shown.expect(r"(w\d+ ){8}")
    shown.type("\x03")
    shown.expect("stopped; the turn is forgotten")
    shown.expect("> ")
    shown.type("/retry\r")
    shown.expect(r"(w\d+ ){8}")
    shown.type("\x03")
    shown.expect("stopped; the first answer stays")
    shown.expect("> ")
    shown.type("\x03")
    assert shown.ends() == 0

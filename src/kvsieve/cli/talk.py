"""The loop of `kvsieve chat`: messages and commands from a terminal or a pipe, and streamed answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

import typer

from kvsieve.cli.kept import found_lines, print_map
from kvsieve.cli.messages import HELP, piped_messages, typed_messages
from kvsieve.cli.output import NARROW, WIDE, one_line, print_table, say, show
from kvsieve.cli.talk_edits import EDITS, edited
from kvsieve.cli.words import Words
from kvsieve.errors import InputError, KvsieveError
from kvsieve.planning.suggestions import did_you_mean
from kvsieve.report.display import span
from kvsieve.text import printable

if TYPE_CHECKING:
    from kvsieve.hf.chat.chat import Chat, ChatSnapshot, Reply
    from kvsieve.hf.generate.stats import Stats

_COMMANDS = {
    "Last turn": {
        "/retry": "answer the last message again, with another seed when sampling",
        "/undo": "undo the last turn or edit",
    },
    "Edit": EDITS,
    "Look up": {
        "/stats": "cost of every turn; /stats wide has all columns",
        "/kept TEXT": "layers that keep TEXT; without TEXT, a map of all tokens",
    },
    "Chat": {
        "/save FILE": "save the chat to FILE; --load FILE continues it",
        "/help": "list the commands",
        "/quit": "quit, as Ctrl-D does",
    },
}
_HEADERS = ["turn", "prompt tokens", "new tokens", "TTFT s", "tokens/s", "KV kept", "KV read", "KV MiB", "ran"]
# Columns of a table of 80 signs.
_SHOWN = 6


class Talk:
    """The loop over messages and commands.

    Errors are printed in a terminal, where the chat continues; they end the command when messages come from a pipe.
    """

    def __init__(
        self, chat: Chat, file: str | None, save: str | None, force: bool, commands: bool, as_json: bool, wide: bool
    ) -> None:
        self.chat = chat
        # Text before the first message, and the turn that has it.
        self.file = file
        self.placed: int | None = None
        self.save_to = save
        self.force = force
        self.as_json = as_json
        self.wide = wide
        self.interactive = is_interactive(as_json)
        self.commands = commands or self.interactive
        self.watched = sys.stderr.isatty()
        self.styled = self.watched and not os.environ.get("NO_COLOR")
        # Messages of this session, as they were written.
        self.said: list[str] = []
        # For /undo: the state, the turn with the file's text, and the messages.
        self.before: tuple[ChatSnapshot, int | None, list[str]] | None = None
        self.unsaved = True
        # Kinds of notes that were printed, without their numbers.
        self.printed: set[str] = set()

    def run(self) -> None:
        """Run the loop. Raises typer.Exit if --save failed in the end."""
        ended = False
        try:
            for line in typed_messages() if self.interactive else piped_messages(self.commands):
                if self._do(line):
                    break
            ended = True
        finally:
            if self.save_to is not None and self.unsaved and self.chat.turns:
                self._save_here()
            if ended and self.save_to is not None and self.unsaved and self.chat.turns:
                raise typer.Exit(1)

    def aside(self, text: str) -> None:
        sys.stdout.flush()
        say(text, dim=self.styled)

    def _do(self, line: str) -> bool:
        if not line.strip():
            return False
        try:
            if self.commands and line.startswith("/"):
                return self._command(line)
            self._turn(line)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            # _turn reports a stopped answer; here a file was being written, atomically.
            say("\nerror: interrupted, not saved" if self.unsaved else "\ninterrupted")
        except KvsieveError as error:
            if not self.interactive:
                raise
            say(f"error: {one_line(error)}")
        except Exception as error:
            if not self.interactive or isinstance(error, BrokenPipeError):
                raise
            say(f"error: unexpected {type(error).__name__}: {one_line(error)}; the turn is forgotten")
        return False

    def _command(self, line: str) -> bool:
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name == "/save":
            if not rest:
                raise InputError("/save needs a file: /save chat.kv")
            self.chat.save(os.path.expanduser(rest), force=self.force)
            self.aside(f"saved to {rest}")
        elif name == "/undo":
            self._undo()
        elif name == "/retry":
            self._turn(self.said[-1] if self.said else "", again=True)
        elif name in {command.split()[0] for command in EDITS}:
            self._edit(name, rest)
        elif name == "/stats":
            self._print_turns(rest)
        elif name == "/kept":
            self._print_kept(rest)
        elif name == "/help":
            self._print_help()
        elif name in ("/quit", "/exit"):
            return True
        else:
            known = [*dict.fromkeys(command.split()[0] for group in _COMMANDS.values() for command in group)]
            hint = did_you_mean(name, known, "commands are")
            raise InputError(f"unknown command {name}{hint}; a message that begins so needs a space before it")
        return False

    def _print_help(self) -> None:
        for group, commands in _COMMANDS.items():
            self.aside(f"{group}:")
            for command, what in commands.items():
                self.aside(f"  {command:<15} {what}")
        self.aside(f"Messages: {HELP}")

    def _print_kept(self, text: str) -> None:
        sys.stdout.flush()
        with contextlib.redirect_stdout(sys.stdout if self.interactive else sys.stderr):
            if not text:
                print_map(self.chat.kept)
            for line in found_lines(self.chat.kept, text) if text else ():
                show(line)

    def _undo(self) -> None:
        if self.before is None:
            raise InputError("/undo forgets the last turn or edit of this session, once; there is none")
        edit = len(self.before[2]) == len(self.said)
        taken, self.placed, self.said = self.before
        self.before = None
        self.chat.rollback(taken)
        self.unsaved = True
        self.aside(f"the last {'edit is undone' if edit else 'turn is forgotten'}")
        self._save_here()

    def _edit(self, name: str, rest: str) -> None:
        before = self.chat.snapshot(), self.placed, [*self.said]
        line, removed = edited(self.chat, name, rest, self._opening)
        if removed is not None and self.placed is not None and removed <= self.placed:
            # The file's text then stands before the next message again.
            self.placed = None if removed == self.placed else self.placed - 1
        self.before = before
        self.unsaved = True
        self.aside(line)
        self._save_here()

    def _opening(self, turn: int | None) -> str:
        """Return the file's text if it stands before the message of a turn, else "". turn: None for the next one."""
        return f"{self.file}\n\n" if self.file is not None and turn == self.placed else ""

    def _turn(self, line: str, again: bool = False) -> None:
        """Send `line` and print the answer or, with `again`, another answer to the last line."""
        message = self._opening(None) + line
        before = (self.chat.snapshot(), self.placed, [*self.said]) if self.commands else None
        turns = self.chat.turns
        try:
            reply = self._answer(None if again else message)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print()
            if self.chat.turns == turns:
                self.aside(f"stopped; {'the first answer stays' if again else 'the turn is forgotten'}")
                return
            reply = None
        if not again:
            self.before = before
            self.placed = len(turns) if self.placed is None else self.placed
            self.said.append(line)
        self.unsaved = True
        if self.as_json and reply is not None:
            data = {"message": line, "answer": reply.text, "ended": reply.ended, "stats": reply.stats.to_dict()}
            print(json.dumps(data, default=str), flush=True)
        else:
            self.aside(f"[{_cost(self.chat)}]")
            stats = self.chat.turns[-1]
            for name, counts in (("drafts", stats.drafts), ("edited", stats.edited)):
                if counts is not None:
                    self.aside(f"{name}: {counts}")
            self._tell_notes()
            if again and not self.chat.options.get("do_sample"):
                self.aside("note: answers are greedy, so this is the same one; --temperature 1 samples others")
        self._save_here()

    def _tell_notes(self) -> None:
        """Print the last turn's notes: each kind once per session, but every cut answer."""
        for note in self.chat.turns[-1].notes:
            kind = re.sub(r"\d+", "", note)
            if kind not in self.printed or note.startswith("the answer was cut"):
                self.aside(f"note: {note}")
            self.printed.add(kind)

    def _answer(self, message: str | None) -> Reply:
        """Stream the answer; message: None to repeat the last one."""
        words = Words(shutil.get_terminal_size((80, 24)).columns if self.interactive else None)
        reading = True

        def show_status(text: str) -> None:
            if reading and self.watched:
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

        def progress(done: int, total: int) -> None:
            nonlocal reading
            if done < total:
                show_status(f"prefill: {done} of {total} tokens")
            if done < total and reading and not (self.watched or self.as_json):
                reading = False
                say(f"prefill: {done} of {total} tokens")

        show_status("prefill ...")
        chat = self.chat
        pieces = chat.stream_retry(progress=progress) if message is None else chat.stream(message, progress=progress)
        with contextlib.closing(pieces) as stream:
            try:
                while True:
                    piece = next(stream)
                    show_status("")
                    reading = False
                    if not self.as_json:
                        show(words.add(printable(piece)), end="")
            except StopIteration as end:
                show_status("")
                if not self.as_json:
                    show(words.rest())
                return end.value
            except BaseException:
                show_status("")
                raise

    def _save_here(self) -> None:
        if self.save_to is None:
            return
        try:
            self.chat.save(self.save_to, force=self.force)
            self.unsaved = False
        except (KvsieveError, OSError) as error:
            say(f"error: not saved: {one_line(error)}")

    def _print_turns(self, columns: str) -> None:
        if columns not in ("", "wide"):
            raise InputError(f"/stats takes nothing, or wide for all columns, got {columns!r}")
        wide = self.wide or columns == "wide"
        shown = len(_HEADERS) if wide else _SHOWN
        rows = [[str(number), *_row(stats)][:shown] for number, stats in enumerate(self.chat.turns, 1)]
        sys.stdout.flush()
        with contextlib.redirect_stdout(sys.stdout if self.interactive else sys.stderr):
            print_table(_HEADERS[:shown], rows, width=WIDE if wide else NARROW)
        for number, stats in enumerate(self.chat.turns, 1):
            for name, counts in (("drafts", stats.drafts), ("edited", stats.edited)):
                if counts is not None:
                    self.aside(f"{name}: turn {number}: {counts}")
            for note in stats.notes:
                self.aside(f"note: turn {number}: {note}")


def is_interactive(as_json: bool) -> bool:
    """Return True if a person types the messages and reads the answers."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not as_json


def _cost(chat: Chat) -> str:
    stats = chat.turns[-1]
    entries = chat.cache.entries()
    seen = chat.cache.conversation.caller_length_and_mask()[0]
    parts = [f"{stats.new_tokens} tokens", f"first after {stats.ttft_s:.2f} s"]
    if stats.tpot_s:
        parts.append(f"{1 / stats.tpot_s:.1f} tokens/s")
    parts.append(f"{span(entries)} of {seen} entries kept")
    if stats.traffic is not None:
        parts.append(f"{stats.traffic.entries:.0f} read per step")
    return ", ".join(parts)


def _row(stats: Stats) -> list[str]:
    return [
        str(stats.prompt_tokens),
        str(stats.new_tokens),
        f"{stats.ttft_s:.2f}",
        "-" if not stats.tpot_s else f"{1 / stats.tpot_s:.1f}",
        span(stats.kv_entries),
        "-" if stats.traffic is None else f"{stats.traffic.entries:.0f}",
        f"{stats.kv_bytes / 2**20:.1f}",
        "yes" if stats.applied else "no",
    ]

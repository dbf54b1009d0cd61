"""Grammars that requests ask for, compiled one at a time, in bounded time and memory."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.hf.generate.grammar import CompiledGrammar, compiled
from kvsieve.planning.grammars import Grammar, library
from kvsieve.serve.schema import ChatRequest, CommonRequest, ResponseFormat
from kvsieve.serve.ticket import BusyError

# Seconds that a grammar may take, that its process may take to start, and that a request waits while grammars of others
# are compiled.
_SECONDS = 5
_START = 60
_PATIENCE = 30


class Grammars:
    """Compiles the grammars of requests, in any thread, for the tokens of a tokenizer.

    A process of its own compiles each one first (grammar_trial.py). It is started for the first grammar, and again
    after one that ended it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._trial: subprocess.Popen[str] | None = None

    def of(
        self,
        request: CommonRequest,
        placed: Callable[[Grammar], Grammar] = lambda grammar: grammar,
        calls: Callable[[], str] | None = None,
    ) -> CompiledGrammar | None:
        """Return the grammar of the answers to a request, or None.

        Args:
            request: of any kind.
            placed: returns the grammar behind the model's reasoning, if it reasons.
            calls: returns the Lark grammar of forced calls, with which a response format has no effect; None for none.

        Raises:
            InputError: more than one is given, or one that cannot be compiled.
            BusyError: grammars of others are compiled for too long.
        """
        given: dict[str, Callable[[], Grammar]] = {}
        if calls is not None:
            given["tool_choice"] = lambda: Grammar.lark(calls())
        if (text := request.grammar) is not None:
            given["grammar"] = lambda: placed(Grammar.lark(text))
        if (pattern := request.regex) is not None:
            given["regex"] = lambda: placed(Grammar.regex(pattern))
        form = request.response_format if isinstance(request, ChatRequest) else None
        if form is not None and form.type != "text" and calls is None:
            given["response_format"] = lambda: placed(_of_format(form))
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are both the form of the whole answer; leave one of them out")
        if not given:
            return None
        ((name, make),) = given.items()
        return self.compiled(name, make)

    def compiled(self, name: str, make: Callable[[], Grammar]) -> CompiledGrammar:
        """Compile the grammar that `make` returns; errors begin with `name`, the request's member. See `of`."""
        if not self._lock.acquire(timeout=_PATIENCE):
            raise BusyError("grammars of other requests are being compiled; try again later", _PATIENCE)
        try:
            library()
            return compiled(make(), self._tokenizer, self._try)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process that compiles grammars."""
        if self._trial is not None:
            self._trial.kill()
            self._trial.communicate()
            self._trial = None

    def _try(self, text: str) -> None:
        """Raise InputError if the process cannot compile a grammar."""
        trial = self._trial = self._trial or self._started()
        reply = _reply(trial, text, _SECONDS)
        if not reply:
            self.close()
            raise InputError(
                f"the grammar takes more than {_SECONDS} s, or too much memory, to compile; give a simpler one"
            )
        if error := json.loads(reply):
            raise InputError(f"the grammar cannot be compiled: {short(error, 400)}")

    def _started(self) -> subprocess.Popen[str]:
        words = self._tokenizer.added_tokens_decoder.items()
        command = [sys.executable, "-m", "kvsieve.serve.grammar_trial"]
        trial = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if not _reply(trial, {token: word.content for token, word in words}, _START):
            trial.kill()
            trial.communicate()
            raise InputError(f"grammars cannot be compiled here: the process for them does not start in {_START} s")
        return trial


def _reply(trial: subprocess.Popen[str], message: Any, seconds: float) -> str:
    """Return the line that a process answers a message with, "" if it does not in time, or has ended."""
    assert trial.stdin is not None and trial.stdout is not None
    try:
        trial.stdin.write(f"{json.dumps(message)}\n")
        trial.stdin.flush()
        return trial.stdout.readline() if select.select([trial.stdout], [], [], seconds)[0] else ""
    except OSError:
        return ""


def _of_format(form: ResponseFormat) -> Grammar:
    if form.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    if form.json_schema is None:
        raise InputError("the type json_schema needs the member json_schema, with the schema")
    return Grammar.json_schema(form.json_schema.schema_)

"""A conversation on one cache: each turn feeds only new tokens, and a failed turn leaves no trace."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Generator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError, InputError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.copies import Forked
from kvsieve.hf.chat.edits import stripped, with_message, without_turn
from kvsieve.hf.chat.options import check_chat_options
from kvsieve.hf.chat.state import ChatSnapshot, ChatState, Reply, Transcript, from_saved, saved_form
from kvsieve.hf.chat.turn import BREAK, TurnMaker, message_of
from kvsieve.hf.chat.worker import streamed
from kvsieve.hf.edit.editor import WINDOW, Edited, Editor
from kvsieve.hf.edit.layout import Window
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.inputs import check_text
from kvsieve.hf.kept import kept_of
from kvsieve.hf.kept_tokens.kept import Kept
from kvsieve.hf.persist.saved import understood
from kvsieve.hf.reuse import PromptStore
from kvsieve.planning.turns import Message
from kvsieve.report.display import mebibytes

_T = TypeVar("_T")


class Chat(Forked):
    """One conversation under a plan. Made by ``Sieve.chat()``.

    A failed turn (an interrupt, an exception in on_text, a message too long for the context, a refused option) leaves
    messages, ids and cache unchanged.
    """

    # Identifies a turn in progress; an attribute of the instance only then.
    _turn: object | None = None
    _instead = "save it with chat.save(path), which sieve.chat(tokenizer, load=path) reads"

    def __init__(
        self,
        sieve: Any,
        tokenizer: Any,
        system: str | None = None,
        *,
        load: str | os.PathLike[str] | None = None,
        store: PromptStore | None = None,
        max_new_tokens: int = 512,
        chunk: int | None = 1024,
        **options: Any,
    ) -> None:
        """See Sieve.chat."""
        max_context = options.pop("max_context", None)
        self._retries = options.pop("retry", False)
        if system is not None:
            check_text("system", system)
        self.sieve = sieve
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {**options, "max_new_tokens": max_new_tokens, "chunk": chunk}
        check_chat_options(self.options, sieve.model)
        self._maker = TurnMaker(sieve, tokenizer, store, self.options, max_context)
        self._store = store
        start = () if system is None else ({"role": "system", "content": system},)
        ids = torch.zeros(1, 0, dtype=torch.int64, device=sieve.model.device)
        self._cache = sieve.new_cache()
        self._state = ChatState(Transcript(ids, start), self._cache.snapshot())
        # The cache agrees with `_state` where it is `_at` it, and else is put right.
        self._at: ChatState | None = self._state
        if load is not None:
            self._load(load, system)

    def __repr__(self) -> str:
        turns = len(self._transcript.turns)
        tokens = self.ids.shape[1]
        size = mebibytes(self.cache.nbytes())
        return f"<Chat under {self.sieve.plan.name}: {turns} turns, {tokens} tokens, KV {size}>"

    @property
    def cache(self) -> SieveCache:
        """The conversation's cache."""
        if self._at is not self._state and self._turn is None:
            self._alone(lambda: None)
        return self._cache

    @property
    def messages(self) -> list[Message]:
        """All messages, as ``{"role", "content"}``; a copy."""
        return [dict(message) for message in self._transcript.messages]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self._transcript.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def context(self) -> str | None:
        """The beginning of the next message, fed by `read`; None without one."""
        return self._transcript.context

    @property
    def turns(self) -> list[Stats]:
        """The statistics of every turn."""
        return list(self._transcript.turns)

    @property
    def ids(self) -> Tensor:
        """int64 [1, N] on the model's device: the conversation as it was fed and generated."""
        return self._transcript.ids

    @property
    def kept(self) -> Kept:
        """Tokens of the conversation that the cache still stores; docs/options.md."""
        return kept_of(self.cache, self.ids, tokenizer=self.tokenizer)

    def ask(
        self,
        message: str,
        on_text: Callable[[str], None] | None = None,
        *,
        role: Literal["user", "tool"] = "user",
        **options: Any,
    ) -> Reply:
        """One turn: the user says `message`, or a tool returns it, and the model answers.

        on_text is called with pieces of the answer. role: "tool" for the result of a tool call, written as the chat
        template writes such results. options: of ``Sieve.generate``, for this turn only; spans of protect= and quotas=
        count the whole conversation (`ids`), protect= accepts "system" and "user" (this turn's message) too,
        question_tokens= the message's last tokens. Raises InputError for a message that is empty or does not fit the
        context with a token of an answer, and a template without tool results, UnsupportedOptionError for beams,
        several answers and options that a chat sets, and any error of on_text.
        """
        said = message_of(role, message)
        return self._alone(lambda: self._take(self._answer(said, on_text, options, lambda: None)))

    def stream(
        self, message: str, *, role: Literal["user", "tool"] = "user", **options: Any
    ) -> Generator[str, None, Reply]:
        """`ask`, as a generator of the answer's pieces, which returns the Reply.

        The model runs in a thread. Closing the generator (leaving its loop) stops it after the current token or chunk,
        and discards the turn, even if the model has finished: a turn counts once the generator has ended. A progress=
        callback is called in that thread.
        """
        return self._streamed(message_of(role, message), options)

    def retry(self, on_text: Callable[[str], None] | None = None, **options: Any) -> Reply:
        """Answer the last message again, replacing its first answer: with other draws under sampling.

        For a chat made with retry=True. options: as for `ask`; options of the first answer alone must be repeated. A
        failure keeps the first answer. Raises InputError if no turn can be answered again, and the errors of `ask`.
        """
        return self._alone(lambda: self._take(self._answer(None, on_text, options, lambda: None)))

    def stream_retry(self, **options: Any) -> Generator[str, None, Reply]:
        """`retry`, as a generator like that of `stream`."""
        return self._streamed(None, options)

    def read(self, text: str, **options: Any) -> None:
        """Prefill the beginning of the next user message, such as a long document, without an answer.

        The next `ask` continues the same message, after a blank line; `snapshot` or `fork` here to ask many questions
        on one context. The plan acts on it without having seen a question. options: protect, quotas, reduce, chunk and
        progress, as for ``Sieve.prefill``. Raises InputError for a text that is empty or too long for the context.
        """
        check_text("text", text)
        options = {"chunk": self.options["chunk"], **options}

        def work() -> None:
            after = self._maker.beginning(self._transcript, text)
            self._at = None
            self._maker.read(after.ids, self._cache, options)
            self._state = self._at = ChatState(after, self._cache.snapshot())

        self._alone(work)

    def remove(self, turn: int, *, window: Window = WINDOW) -> Edited:
        """Remove a turn, a user message and its answer; later turns stay, at new positions.

        Args:
            turn: number of the turn, from 0; -1 for the last one.
            window: see ``Sieve.edit``.

        Raises:
            InputError: there is no such turn, or it is the only one.
            UnsupportedOptionError: see ``Sieve.edit``.
        """
        return self._alone(lambda: self._edit(without_turn(self._transcript.messages, turn), window, turn))

    def replace(self, turn: int, text: str, *, window: Window = WINDOW) -> Edited:
        """Replace a turn's user message; its answer and later turns stay. Arguments and errors as of `remove`."""
        check_text("text", text)
        return self._alone(lambda: self._edit(with_message(self._transcript.messages, turn, text), window))

    def strip(self, *, reasoning: bool = True, tools_before: int | None = None, window: Window = WINDOW) -> Edited:
        """Shorten earlier turns as a chat template or an agent does.

        Args:
            reasoning: remove the reasoning, up to ``</think>``, from all answers.
            tools_before: put "[cleared]" in place of tool results before the last n turns; None keeps all.
            window: see ``Sieve.edit``.

        Raises:
            InputError: n is no number of turns, or see `remove`.
            UnsupportedOptionError: see ``Sieve.edit``.
        """
        return self._alone(lambda: self._edit(stripped(self._transcript.messages, reasoning, tools_before), window))

    def _edit(self, messages: tuple[Message, ...], window: Window, removed: int | None = None) -> Edited:
        """Give the conversation other messages, reusing entries."""
        before = self._transcript
        if before.context is not None:
            raise InputError("the next message has begun with read(); ask it first, or roll back, then edit")
        if not before.turns:
            raise InputError("the chat has no turn yet")
        after = self._maker.rebuilt(before, messages, removed)
        turns = list(before.turns)
        if removed is not None:
            del turns[removed]
        known = before.ids[:, : self._cache.num_seen]
        self._at = None
        editor = Editor(self.sieve, self._cache, known, window, chunk=self.options["chunk"])
        # The last token was never fed.
        edited = editor.become(after.ids[:, :-1])
        same = messages == before.messages and torch.equal(after.ids, before.ids)
        after = dataclasses.replace(after, turns=tuple(turns))
        self._state = self._at = ChatState(after, self._cache.snapshot(), self._state.before if same else None)
        return edited

    def snapshot(self) -> ChatSnapshot:
        """Return a state for `rollback`, any number of times, messages and ids included; see SieveCache.snapshot.

        Raises CacheStateError in the middle of a turn.
        """
        return self._alone(lambda: ChatSnapshot(self._state))

    def rollback(self, snapshot: ChatSnapshot) -> None:
        """Restore this chat to the state of a snapshot.

        Raises CacheStateError for a snapshot of another chat (a fork is another), and in the middle of a turn.
        """

        def work() -> None:
            if not isinstance(snapshot, ChatSnapshot) or snapshot.state.cache.cache() is not self._cache:
                raise CacheStateError("the snapshot was taken of another cache; roll that one back, or fork it")
            # The cache follows, as after a turn that failed.
            self._at = None
            self._state = snapshot.state

        self._alone(work)

    def fork(self) -> Chat:
        """Return an independent copy. Raises CacheStateError in the middle of a turn."""

        def work() -> Chat:
            other = Chat(self.sieve, self.tokenizer, store=self._store, retry=self._retries, **self.options)
            other._maker, other._cache = self._maker, self._cache.fork()
            other._state = other._at = dataclasses.replace(self._state, cache=other._cache.snapshot(), before=None)
            return other

        return self._alone(work)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the chat to a file that ``sieve.chat(tokenizer, load=path)`` continues.

        force: replace a file there that kvsieve did not save. Raises CacheStateError in the middle of a turn,
        InputError for such a file, CacheFileError if it cannot be saved or written.
        """

        def work() -> None:
            extra = {"chat": saved_form(self._transcript)}
            self.sieve.save(self._cache, path, tokenizer=self.tokenizer, ids=self.ids, extra=extra, force=force)

        self._alone(work)

    def _load(self, path: str | os.PathLike[str], system: str | None) -> None:
        saved = self.sieve.load(path, tokenizer=self.tokenizer)
        form = saved.extra.get("chat")
        if not isinstance(form, dict) or saved.ids is None or len(saved.ids) != 1:
            raise InputError(f"{os.fspath(path)!r} holds a cache but no chat; go on with sieve.load() and generate")
        with understood(path):
            transcript = from_saved(form, saved.ids.to(self.sieve.model.device))
        state = ChatState(transcript, saved.cache.snapshot())
        self._cache = saved.cache
        self._state = state
        self._at = state
        if system is not None and system != self.system:
            has = "none" if self.system is None else repr(self.system)
            raise InputError(f"the chat in {os.fspath(path)!r} has another system prompt ({has}); leave system= out")

    def _streamed(self, message: Message | None, options: dict[str, Any]) -> Generator[str, None, Reply]:
        def answer(on_text: Callable[[str], None], check: Callable[[], None]) -> tuple[Reply, ChatState]:
            return self._answer(message, on_text, options, check)

        return streamed(self._alone, answer, self._take)

    def _answer(
        self,
        message: Message | None,
        on_text: Callable[[str], None] | None,
        given: dict[str, Any],
        check: Callable[[], None],
    ) -> tuple[Reply, ChatState]:
        """Return the answer to a message, or again to the last one (None), and the new state. check: raises to end."""
        again = message is None
        message = self._last_message() if message is None else message
        question = self._maker.question(self._start(again).transcript, message, given, self.options)
        self._at = None
        if again:
            self._cache.rollback(self._start(again).cache)
        reply, after = self._maker.answer(self._start(again).transcript, question, self._cache, on_text, check)
        before = dataclasses.replace(self._start(again), before=None) if self._retries else None
        return reply, ChatState(after, self._cache.snapshot(), before)

    def _take(self, made: tuple[Reply, ChatState]) -> Reply:
        reply, state = made
        self._state = self._at = state
        return reply

    def _start(self, again: bool) -> ChatState:
        """Return the state at the beginning of a turn, which no caller keeps in a variable; see `_transcript`.

        Raises InputError.
        """
        start = self._state.before if again else self._state
        if start is None:
            why = "none was made since the chat began, was edited, loaded or forked, or read ahead; ask a message first"
            if not self._retries:
                why = "the chat does not hold the state before it; make the chat with sieve.chat(tokenizer, retry=True)"
            raise InputError(f"there is no turn to answer again: {why}")
        return start

    def _last_message(self) -> Message:
        """Return the last message without the part fed by `read`. Raises InputError."""
        context = self._start(again=True).transcript.context
        last = self._transcript.messages[-2]
        return last if context is None else {**last, "content": last["content"].removeprefix(f"{context}{BREAK}")}

    @property
    def _transcript(self) -> Transcript:
        # Not the state: its cache would live as long as a traceback.
        return self._state.transcript

    def _alone(self, work: Callable[[], _T]) -> _T:
        """Do `work` with exclusive use of the chat, and a cache that agrees with `_state`.

        An interrupt at any point leaves the chat unlocked, and a cache that the next call restores.
        """
        lock = object()
        # Twice, because an interrupt may come within the final steps.
        try:
            try:
                if vars(self).setdefault("_turn", lock) is not lock:
                    raise CacheStateError("a turn of this chat is in progress: let it end, or close its stream")
                self._settle()
                return work()
            finally:
                if self._turn is lock:
                    self._settle()
                    del self._turn
        finally:
            if self._turn is lock:
                del self._turn

    def _settle(self) -> None:
        """Restore the cache after a failed turn."""
        state = self._state
        if self._at is not state:
            self._cache.rollback(state.cache)
            self._at = state

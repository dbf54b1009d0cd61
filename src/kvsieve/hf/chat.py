"""A conversation on one cache: each turn feeds what is new, and a turn that fails leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvsieve.errors import CacheStateError, InputError, UnsupportedOptionError
from kvsieve.hf.cache import SieveCache, Snapshot
from kvsieve.hf.generate import Decoding, Stats, Storage, Traffic
from kvsieve.turns import Message, Turns, stop_ids

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve

_BREAK = "\n\n"
_NOT_HERE = {
    "cache": "a chat has a cache of its own",
    "past_key_values": "a chat has a cache of its own",
    "input_ids": "a chat writes its prompt itself",
    "attention_mask": "a chat writes its prompt itself",
    "streamer": "use on_text= or stream()",
    "max_length": "use max_new_tokens=",
}


@dataclass(frozen=True)
class Reply:
    """One answer.

    text: what the pieces given to on_text are together, special tokens left out. tokens: the ids that were generated,
    the one that ended the turn included. ended: True when the model ended its answer itself, False when it was cut.
    stats: of this turn's generate call; stats.notes say where the context cut the answer.
    """

    text: str
    tokens: list[int]
    ended: bool
    stats: Stats


@dataclass(frozen=True)
class _State:
    """ids: int64 [1, N], all that was fed or generated. context: the next user message's text so far, fed already.
    ended: the last id ends an answer, and was not read yet."""

    ids: Tensor
    messages: tuple[Message, ...]
    turns: tuple[Stats, ...] = ()
    context: str | None = None
    ended: bool = False


@dataclass(frozen=True, eq=False)
class ChatSnapshot:
    """A chat at one moment; see Chat.snapshot."""

    cache: Snapshot
    state: _State


class Chat:
    """One conversation under a plan. Made by ``Sieve.chat()``.

    A turn that does not end well (an interrupt, an exception in on_text, a message too long for the context, an option
    that is refused) leaves messages, ids and cache as they were before it.
    """

    def __init__(
        self,
        sieve: Sieve,
        tokenizer: Any,
        system: str | None = None,
        *,
        load: str | os.PathLike[str] | None = None,
        max_new_tokens: int = 512,
        chunk: int | None = 1024,
        **options: Any,
    ) -> None:
        """See Sieve.chat."""
        if system is not None:
            _check_text("system", system)
        self.sieve, self.tokenizer = sieve, tokenizer
        self.options: dict[str, Any] = {**options, "max_new_tokens": max_new_tokens, "chunk": chunk}
        self._check_options(self.options)
        self._turns = Turns(tokenizer)
        self._stops = stop_ids(tokenizer, sieve.model.generation_config.eos_token_id)
        self._lock = threading.Lock()
        start = () if system is None else ({"role": "system", "content": system},)
        self._state = _State(torch.zeros(1, 0, dtype=torch.int64, device=sieve.model.device), start)
        self.cache: SieveCache = sieve.new_cache()
        if load is not None:
            self._load(load, system)

    @property
    def messages(self) -> list[Message]:
        """All that was said, as ``{"role", "content"}``; a copy."""
        return [dict(message) for message in self._state.messages]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self._state.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def context(self) -> str | None:
        """What `read` has read of the next message; None if nothing."""
        return self._state.context

    @property
    def turns(self) -> list[Stats]:
        """The statistics of every turn."""
        return list(self._state.turns)

    @property
    def ids(self) -> Tensor:
        """int64 [1, N] on the model's device: the conversation as it was fed and generated."""
        return self._state.ids

    def ask(self, message: str, on_text: Callable[[str], None] | None = None, **options: Any) -> Reply:
        """One turn: the user says `message`, the model answers.

        on_text is called with pieces of the answer as they come. options: of ``Sieve.generate``, for this turn only;
        spans of protect= and quotas= count the whole conversation (`ids`), question= the message's last tokens.

        Raises InputError for a message that is empty or does not fit the context with a token of an answer,
        UnsupportedOptionError for beams, several answers and what a chat does itself, and whatever on_text raises.
        """
        return self._ask(message, on_text, options, lambda: None)

    def stream(self, message: str, **options: Any) -> Generator[str, None, Reply]:
        """`ask`, as a generator of the answer's pieces, which returns the Reply.

        The model runs in a thread. Closing the generator (leaving its loop) stops it after the token or the chunk of
        the prompt that it is at, and the turn is forgotten. A progress= callback is called in that thread.
        """
        said: SimpleQueue[str | Reply | BaseException] = SimpleQueue()
        stop = threading.Event()
        inference = torch.is_inference_mode_enabled()

        def check() -> None:
            if stop.is_set():
                raise _Stopped

        def work() -> None:
            try:
                with torch.inference_mode(inference):
                    said.put(self._ask(message, said.put, options, check))
            except BaseException as error:
                said.put(error)

        worker = threading.Thread(target=work, name="kvsieve-chat", daemon=True)
        worker.start()
        try:
            while isinstance(part := said.get(), str):
                yield part
            if isinstance(part, BaseException):
                raise part
            return part
        finally:
            stop.set()
            _join(worker)

    def read(self, text: str, **options: Any) -> None:
        """Read the beginning of the next user message, such as a long document, and answer nothing yet.

        The next `ask` goes on with the same message, after a blank line; `snapshot` or `fork` here to ask many
        questions on one context. The plan reduces what it has read without having seen a question. options: protect,
        quotas, reduce, chunk and progress, as for ``Sieve.prefill``.

        Raises InputError for a text that is empty or too long for the context.
        """
        _check_text("text", text)
        options = {"chunk": self.options["chunk"], **options}
        with self._idle():
            state, text = self._state, text.rstrip()
            fed = text if state.context is None else f"{_BREAK}{text}"
            ids, _ = self._fed(state, fed, open_end=True)
            with self._or_nothing():
                self.sieve.prefill(ids, torch.ones_like(ids), cache=self.cache, **options)
                self._state = dataclasses.replace(state, ids=ids, context=(state.context or "") + fed, ended=False)

    def snapshot(self) -> ChatSnapshot:
        """What `rollback` brings back, any number of times, messages and ids included; see SieveCache.snapshot.

        Raises CacheStateError in the middle of a turn.
        """
        with self._idle():
            return ChatSnapshot(self.cache.snapshot(), self._state)

    def rollback(self, snapshot: ChatSnapshot) -> None:
        """Make this chat what it was when `snapshot` was taken of it.

        Raises CacheStateError for a snapshot of another chat (a fork is another), and in the middle of a turn.
        """
        with self._idle():
            self.cache.rollback(snapshot.cache)
            self._state = snapshot.state

    def fork(self) -> Chat:
        """A copy that goes its own way. Raises CacheStateError in the middle of a turn."""
        with self._idle():
            other = Chat(self.sieve, self.tokenizer, **self.options)
            other.cache, other._state = self.cache.fork(), self._state
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chat to a file that ``sieve.chat(tokenizer, load=path)`` goes on with.

        Raises CacheStateError in the middle of a turn, and OSError.
        """
        with self._idle():
            state = self._state
            chat = {
                "messages": list(state.messages),
                "turns": [stats.to_dict() for stats in state.turns],
                "context": state.context,
                "ended": state.ended,
            }
            self.sieve.save(self.cache, path, tokenizer=self.tokenizer, ids=state.ids, extra={"chat": chat})

    def _load(self, path: str | os.PathLike[str], system: str | None) -> None:
        saved = self.sieve.load(path, tokenizer=self.tokenizer)
        chat = saved.extra.get("chat")
        if not isinstance(chat, dict) or saved.ids is None or len(saved.ids) != 1:
            raise InputError(f"{os.fspath(path)!r} holds a cache but no chat; go on with sieve.load() and generate")
        ids = saved.ids.to(self.sieve.model.device)
        self.cache = saved.cache
        self._state = _State(
            ids, tuple(chat["messages"]), tuple(map(_stats, chat["turns"])), chat["context"], chat["ended"]
        )
        if system is not None and system != self.system:
            has = "none" if self.system is None else repr(self.system)
            raise InputError(f"the chat in {os.fspath(path)!r} has another system prompt ({has}); leave system= out")

    def _ask(
        self, message: str, on_text: Callable[[str], None] | None, given: dict[str, Any], check: Callable[[], None]
    ) -> Reply:
        _check_text("message", message)
        self._check_options(given)
        with self._idle():
            return self._answer(message, on_text, {**self.options, **given}, check)

    def _answer(
        self, message: str, on_text: Callable[[str], None] | None, options: dict[str, Any], check: Callable[[], None]
    ) -> Reply:
        state = self._state
        ids, context = self._fed(state, message if state.context is None else f"{_BREAK}{message}")
        wanted = options.pop("max_new_tokens")
        most = wanted if context is None else min(wanted, context - ids.shape[1])
        stops = self._complete(options)
        progress = options.pop("progress", None)

        def shown(done: int, total: int) -> None:
            check()
            if progress is not None:
                progress(done, total)

        pieces = _Pieces(self.tokenizer, stops, on_text, check)
        with self._or_nothing():
            result = self.sieve.generate(
                ids,
                torch.ones_like(ids),
                cache=self.cache,
                max_new_tokens=most,
                streamer=pieces,
                progress=shown,
                **options,
            )
            new = result.sequences[:, ids.shape[1] :]
            made, stats = new[0].tolist(), result.stats
            ended = made[-1] in stops
            if most < wanted and len(made) == most and not ended:
                note = (
                    f"the answer was cut at {most} tokens, where the model's context of {context} ends: start a new "
                    "chat, or go back to an earlier snapshot"
                )
                stats = dataclasses.replace(stats, notes=[*stats.notes, note])
            said = message if state.context is None else f"{state.context}{_BREAK}{message}"
            exchange = {"role": "user", "content": said}, {"role": "assistant", "content": pieces.text}
            self._state = _State(
                torch.cat([ids, new.to(ids)], 1),
                (*state.messages, *exchange),
                (*state.turns, stats),
                ended=ended,
            )
        return Reply(pieces.text, made, ended, stats)

    def _fed(self, state: _State, text: str, open_end: bool = False) -> tuple[Tensor, int | None]:
        """int64 [1, N]: the conversation with a message, up to the answer; and where the context ends, None if nowhere.

        The token that ended an answer was never read by the model: where the template writes another, or more, it
        gives way.
        """
        known = state.ids
        added = self._turns.added(state.messages, text, before=state.context, open_end=open_end)
        if state.ended:
            last = int(known[0, -1])
            at = added.index(last) if last in added else -1
            if at >= 0 and not self.tokenizer.decode(added[:at]).strip():
                added = added[at + 1 :]
            else:
                known = known[:, :-1]
        ids = torch.cat([known, known.new_tensor([added])], 1)
        context = getattr(self.sieve.config, "max_position_embeddings", None)
        if context is not None and ids.shape[1] + 1 > context:
            raise InputError(
                f"the conversation has {known.shape[1]} tokens and this message adds {len(added)}: with one token of "
                f"an answer that is more than the model's context of {context}; say less, roll back to an earlier "
                "snapshot, or start a new chat"
            )
        return ids, context

    def _complete(self, options: dict[str, Any]) -> frozenset[int]:
        """Fill in what generate needs to know, and return the tokens that end this answer."""
        config = options.get("generation_config")
        if "eos_token_id" in options:
            ends = options["eos_token_id"]
            stops = frozenset([] if ends is None else ends if isinstance(ends, (list, tuple)) else [ends])
        else:
            stops = self._stops if config is None else stop_ids(self.tokenizer, config.eos_token_id)
            options["eos_token_id"] = sorted(stops) or None
        if config is None:
            options.setdefault("do_sample", False)
        if getattr(config or self.sieve.model.generation_config, "pad_token_id", None) is None:
            pad = self.tokenizer.pad_token_id
            options.setdefault("pad_token_id", min(stops, default=0) if pad is None else pad)
        if options.get("stop_strings") is not None:
            options.setdefault("tokenizer", self.tokenizer)
        return stops

    def _check_options(self, options: dict[str, Any]) -> None:
        for name, instead in _NOT_HERE.items():
            if options.get(name) is not None:
                raise UnsupportedOptionError(f"{name}= is not for a chat: {instead}")
        config = options.get("generation_config") or self.sieve.model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            if (options.get(name, getattr(config, name, None)) or 1) > 1:
                raise UnsupportedOptionError(
                    f"{name}={options.get(name, getattr(config, name, None))} gives a chat several answers to go on "
                    f"from; pass {name}=1, or use fork() and ask in each"
                )
        new = options.get("max_new_tokens", 1)
        if not isinstance(new, int) or isinstance(new, bool) or new < 1:
            raise InputError(f"max_new_tokens must be a number of tokens, at least 1, got {new!r}")

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise CacheStateError("a turn of this chat is in progress: let it end, or close its stream, and try again")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """Whatever goes wrong in here did not happen."""
        before = ChatSnapshot(self.cache.snapshot(), self._state)
        try:
            yield
        except BaseException:
            self._restore(before)
            raise
        finally:
            # A traceback that is kept would keep its memory.
            del before

    def _restore(self, snapshot: ChatSnapshot) -> None:
        while True:
            try:
                self.cache.rollback(snapshot.cache)
                self._state = snapshot.state
                return
            except KeyboardInterrupt:
                # Another one, of someone impatient: the first is on its way already.
                continue


class _Stopped(BaseException):
    """Ends a turn whose stream was closed."""


class _Pieces(BaseStreamer):
    """Turns tokens into pieces of text, none of which ends within a character."""

    def __init__(
        self, tokenizer: Any, stops: frozenset[int], on_text: Callable[[str], None] | None, check: Callable[[], None]
    ) -> None:
        self.tokenizer, self.stops, self.on_text, self.check = tokenizer, stops, on_text, check
        self.text = ""
        self._begun = False
        self._made: list[int] = []
        # Tokens from `start` on are decoded anew, those up to `told` only to see what they add together.
        self._start = self._told = 0

    def put(self, value: Tensor) -> None:
        # What comes first is the prompt.
        if not self._begun:
            self._begun = True
            return
        self.check()
        self._made += [token for token in value.flatten().tolist() if token not in self.stops]
        self._tell(last=False)

    def end(self) -> None:
        self._tell(last=True)

    def _tell(self, last: bool) -> None:
        before = self._decode(self._made[self._start : self._told])
        piece = self._decode(self._made[self._start :])[len(before) :]
        if not piece or (piece.endswith("\ufffd") and not last):
            return
        self._start, self._told = self._told, len(self._made)
        self.text += piece
        if self.on_text is not None:
            self.on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _join(worker: threading.Thread) -> None:
    """Wait for it, whatever comes; an interrupt meanwhile is raised after that."""
    interrupt = None
    while worker.is_alive():
        try:
            worker.join()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _stats(data: dict[str, Any]) -> Stats:
    """The inverse of Stats.to_dict."""
    parts: dict[str, Any] = {"traffic": Traffic, "storage": Storage, "decoding": Decoding}
    return Stats(**{name: parts[name](**part) if part and name in parts else part for name, part in data.items()})


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{name} must be a text of at least a character, got {text!r}")


__all__ = ["Chat", "ChatSnapshot", "Reply"]

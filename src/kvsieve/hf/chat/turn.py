"""One turn of a conversation: the ids of a message, and the model's answer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvsieve.errors import InputError, KvsieveWarning, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.chat.edits import first_turn
from kvsieve.hf.chat.options import check_chat_options, complete_options
from kvsieve.hf.chat.pieces import Pieces
from kvsieve.hf.chat.state import Reply, Transcript
from kvsieve.hf.inputs import check_callable, check_text
from kvsieve.hf.model.context import context_of
from kvsieve.hf.reuse import PromptStore, ReadPrefix, StoredPrefixes, check_servable, check_store, unserved
from kvsieve.planning.segments import role_spans
from kvsieve.planning.turns import Message, Turns, escaped, stop_ids, token_ids

BREAK = "\n\n"
# Most tokens of the tag with which a template begins reasoning, and of white space after it.
_TAG = 6


@dataclass(frozen=True)
class Question:
    """A user's message, ready to be fed.

    Attributes:
        ids: int64 [1, N], the conversation with the message, up to the answer.
        context: tokens of the model's context, or None without a limit.
        message: of the user or a tool, including the part fed by `Chat.read`.
        stops: ids that end an answer.
        max_new_tokens: most tokens of an answer.
        progress: the caller's callback.
        options: the other options of ``Sieve.generate``.
    """

    ids: Tensor
    context: int | None
    message: Message
    stops: frozenset[int]
    max_new_tokens: int
    progress: Callable[[int, int], None] | None
    options: dict[str, Any]


def message_of(role: str, text: str) -> Message:
    """Return a message of a user or a tool. Raises InputError for another role."""
    if role not in ("user", "tool"):
        raise InputError(f"role is 'user', or 'tool' for the result of a tool call; got {short(role)}")
    return {"role": role, "content": text}


class TurnMaker:
    """Makes the turns of a conversation. Stateless, except for changes of the given cache."""

    def __init__(
        self,
        sieve: Any,
        tokenizer: Any,
        store: PromptStore | None,
        options: Mapping[str, Any],
        max_context: int | None = None,
    ) -> None:
        """options: of the chat. max_context: tokens of the conversation; None for the model's context."""
        check_store(store)
        if store is not None:
            check_servable(sieve, options)
        if max_context is not None and (type(max_context) is not int or max_context < 2):
            raise InputError(f"max_context must be a number of tokens, at least 2, got {short(max_context)}")
        self.sieve = sieve
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.prefixes = None if store is None else StoredPrefixes(store)
        self.turns = Turns(tokenizer)
        self.stops = stop_ids(tokenizer, sieve.model.generation_config.eos_token_id)

    def question(
        self, before: Transcript, message: Message, given: dict[str, Any], options: dict[str, Any]
    ) -> Question:
        """Return the next message, checked.

        Args:
            before: the conversation so far.
            message: of the user or a tool.
            given: options of this turn.
            options: the chat's options, as defaults.
        """
        text = message["content"]
        check_text("message", text)
        if before.context is not None and message["role"] != "user":
            raise InputError("the next message has begun with read() and is the user's; ask it first")
        config = given.get("generation_config")
        # One of another kind is refused with the other options.
        if isinstance(config, GenerationConfig) and config.max_new_tokens is not None:
            given = {"max_new_tokens": config.max_new_tokens, **given}
        options = {**options, **given}
        check_chat_options(options, self.sieve.model)
        fed = text if before.context is None else f"{BREAK}{text}"
        ids, context = self._fed(before, {**message, "content": fed})
        wanted = options.pop("max_new_tokens")
        stops = complete_options(options, self.sieve.model, self.tokenizer, self.stops)
        if "protect" in options:
            options["protect"] = self._protected(before, ids, options["protect"])
        progress = options.pop("progress", None)
        check_callable("progress", progress)
        said = {**message, "content": (before.context or "") + fed}
        return Question(ids, context, said, stops, wanted, progress, options)

    def _protected(self, before: Transcript, ids: Tensor, given: Any) -> Any:
        """Return protect= with spans for the roles it names: "system", and "user" for this turn. Raises InputError."""
        roles = [role for role in given if isinstance(role, str)] if isinstance(given, (list, tuple)) else []
        if not roles:
            return given
        system = before.messages[:1]
        end = 0
        if system and system[0]["role"] == "system":
            ((_, end),) = role_spans(self.tokenizer, [*system, {"role": "user", "content": "?"}], ("system",))[1]
        spans = {"system": (0, end), "user": (max(end, before.ids.shape[1]), ids.shape[1])}
        for role in roles:
            if role not in spans:
                raise InputError(f"protect= of a chat takes 'system', 'user' and spans such as (0, 40), got {role!r}")
        if "system" in roles and not end:
            raise InputError("protect= names the system prompt, and this chat has none; give it one with system=")
        return [spans[item] if isinstance(item, str) else item for item in given]

    def answer(
        self,
        before: Transcript,
        question: Question,
        cache: SieveCache,
        on_text: Callable[[str], None] | None,
        check: Callable[[], None],
    ) -> tuple[Reply, Transcript]:
        """Return the model's answer, and the conversation with it. check: raises to end the turn."""
        ids = question.ids
        wanted = question.max_new_tokens
        context = question.context
        progress = question.progress
        most = wanted if context is None else min(wanted, context - ids.shape[1])

        start = cache.num_seen
        skipped = 0

        def shown(done: int, total: int) -> None:
            check()
            if progress is not None:
                size = max(total, ids.shape[1] - start) if skipped else total
                progress(min(done + skipped, size), size)

        pieces = Pieces(self.tokenizer, question.stops, on_text, check)
        prefixes, left_out = self._prefixes(question.options)
        begun = ReadPrefix()
        if prefixes is not None:
            begun = prefixes.begin(self.sieve, ids, cache, question.options["chunk"], shown)
            skipped = cache.num_seen - start
        result = self.sieve.generate(
            ids,
            torch.ones_like(ids),
            cache=cache,
            max_new_tokens=most,
            streamer=pieces,
            progress=shown,
            **question.options,
        )
        if prefixes is not None:
            seconds = begun.seconds + result.stats.ttft_s
            prefixes.add(self.sieve, result.sequences[0].tolist(), cache, seconds, question.options["chunk"])
        new = result.sequences[:, ids.shape[1] :]
        tokens = new[0].tolist()
        stats = begun.with_reuse(result.stats)
        ended = tokens[-1] in question.stops
        notes = [*stats.notes, *left_out]
        if most < wanted and len(tokens) == most and not ended:
            notes.append(
                f"the answer was cut at {most} tokens, where {self._named(context)} ends: start a new "
                "chat, or go back to an earlier snapshot"
            )
        stats = dataclasses.replace(stats, notes=notes)
        messages = (*before.messages, question.message, {"role": "assistant", "content": pieces.text})
        sizes = before.sizes_after(ids, len(tokens))
        whole = torch.cat([ids, new.to(ids)], 1)
        after = Transcript(whole, messages, (*before.turns, stats), ended=ended, sizes=sizes)
        return Reply(pieces.text, tokens, ended, stats), after

    def read(self, ids: Tensor, cache: SieveCache, options: dict[str, Any]) -> None:
        """Prefill the conversation int64 [1, N] with the beginning of a message; options of ``Sieve.prefill``."""
        prefixes, left_out = self._prefixes(options)
        for note in left_out:
            warnings.warn(note, KvsieveWarning, stacklevel=5)
        if prefixes is None:
            self.sieve.prefill(ids, torch.ones_like(ids), cache=cache, **options)
        else:
            prefixes.prefill(self.sieve, ids, cache, options)

    def _prefixes(self, options: dict[str, Any]) -> tuple[StoredPrefixes | None, list[str]]:
        """Return the store for a turn with options, or None and notes on the reason."""
        reason = None if self.prefixes is None else unserved(self.sieve, options)
        return (self.prefixes, []) if reason is None else (None, [f"the store was left out: {reason}"])

    def beginning(self, before: Transcript, text: str) -> Transcript:
        """Return the conversation with the beginning of the next user message, which gets no answer yet."""
        said = text.rstrip()
        fed = said if before.context is None else f"{BREAK}{said}"
        ids, _ = self._fed(before, {"role": "user", "content": fed}, open_end=True)
        context = (before.context or "") + fed
        return dataclasses.replace(before, ids=ids, context=context, ended=False, sizes=before.sizes_in(ids))

    def rebuilt(self, before: Transcript, messages: Sequence[Message], removed: int | None = None) -> Transcript:
        """Return a conversation with other messages as it would have been fed and generated, without statistics.

        Tokens of unchanged turns stay as they are. Raises InputError if it does not fit the context.

        Args:
            before: the conversation, of complete turns.
            messages: an optional system prompt, then messages of a user or tool, each with an answer.
            removed: number of the turn that they lack; None for none.
        """
        turns = before.fed_turns()
        last = turns[-1].number
        if removed is not None:
            del turns[removed]
        first = first_turn(messages)
        so_far = Transcript(before.ids[:, :0], tuple(messages[:first]))
        # Number of the turn before, if its tokens are unchanged.
        previous: int | None = -1
        for at, turn in zip(range(first, len(messages), 2), turns, strict=True):
            message, answer = messages[at : at + 2]
            if turn.is_known and previous == turn.number - 1 and message == turn.message:
                ids = torch.cat([so_far.ids, turn.fed], 1)
            else:
                ids, _ = self._fed(so_far, message)
            same = turn.is_known and answer == turn.answer
            if not ("</think>" in answer["content"] or (same and self._reasons(turn.fed))):
                ids = ids[:, : ids.shape[1] - self._reasons(ids)]
            after = tuple(messages[: at + 2])
            if same:
                said = turn.said
                ended = before.ended if turn.number == last else not self.stops.isdisjoint(said[0, -1:].tolist())
            else:
                ended = before.ended or at + 2 < len(messages)
                words = token_ids(self.tokenizer, escaped(self.tokenizer, answer["content"]))
                said = ids.new_tensor([[*words, *(self._end(after) if ended else [])]])
            sizes = so_far.sizes_after(ids, said.shape[1])
            so_far = Transcript(torch.cat([ids, said], 1), after, ended=ended, sizes=sizes)
            previous = turn.number if same else None
        size = so_far.ids.shape[1]
        if self.max_context is not None and size > max(self.max_context, before.ids.shape[1]):
            raise InputError(
                f"the conversation would have {size} tokens, more than max_context={self.max_context}; say less, or "
                "remove other turns first"
            )
        return so_far

    def _reasons(self, ids: Tensor) -> int:
        """Return the number of tokens at the end of int64 [1, N] that begin the reasoning of an answer."""
        counts = range(1, min(_TAG, ids.shape[1]) + 1)
        return next((count for count in counts if self.tokenizer.decode(ids[0, -count:]).strip() == "<think>"), 0)

    def _end(self, messages: tuple[Message, ...]) -> list[int]:
        """Return the token that ends an answer, as the template writes it."""
        return [next((token for token in self.turns.added(messages, "?") if token in self.stops), min(self.stops))]

    def _fed(self, before: Transcript, message: Message, open_end: bool = False) -> tuple[Tensor, int | None]:
        """Return int64 [1, N]: the conversation with a message, up to the answer; and the end of the context, or None.

        The end token of an answer was never processed by the model: if the template has other tokens there, they
        replace it.
        """
        known = before.ids
        text = message["content"]
        added = self.turns.added(
            before.messages, text, tool=message["role"] == "tool", before=before.context, open_end=open_end
        )
        if before.ended:
            last = int(known[0, -1])
            at = added.index(last) if last in added else -1
            if at >= 0 and not self.tokenizer.decode(added[:at]).strip():
                added = added[at + 1 :]
            else:
                known = known[:, :-1]
        ids = torch.cat([known, known.new_tensor([added])], 1)
        context = min((length for length in (context_of(self.sieve.config), self.max_context) if length), default=None)
        if context is not None and ids.shape[1] + 1 > context:
            raise InputError(
                f"the conversation has {known.shape[1]} tokens and this message adds {len(added)}: with one token of "
                f"an answer that is more than {self._named(context)}; say less, roll back to an earlier "
                "snapshot, or start a new chat"
            )
        return ids, context

    def _named(self, context: int | None) -> str:
        return f"max_context={context}" if context == self.max_context else f"the model's context of {context}"

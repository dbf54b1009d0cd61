"""Preparation of requests: checking, chat template, tokenizing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kvsieve.decoding.asked import Sampling
from kvsieve.detokenize import text_of, token_bytes
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.generate.config import check_config, config_in_effect, who_says
from kvsieve.hf.generate.grammar import CompiledGrammar
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.planning.budget import percent_doubt
from kvsieve.planning.grammars import Grammar
from kvsieve.planning.turns import escaped, plain_ids, render, stop_ids, token_ids
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.documents import checked_documents, split_prompt, with_documents
from kvsieve.serve.grammars import Grammars
from kvsieve.serve.images import ImageFile, ImageReader
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.messages import all_texts, forced_tools, parted, template_message, template_options, template_tool
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.parsers.found import forms_of
from kvsieve.serve.schema import ChatRequest, CommonRequest, CompletionRequest, NamedTool, TokenizeRequest
from kvsieve.serve.ticket import Order, PromptImages

# Temperatures below which only the likeliest token has a probability above 0, and logits overflow float32.
_COLD = 1e-4
# Context that bounds texts for models without a limit, most characters per token, and characters tokenized at a time.
_ENDLESS = 1 << 18
_CHARACTERS = 16
_PIECE = 1 << 14
# Members of a chat that the prompt is made of.
_TEXTS: dict[str, Any] = {"messages": True, "tools": True, "chat_template_kwargs": True, "kv": {"documents"}}

# Attributes of a checkpoint's generation_config that generate supports and the server does not, with their neutral
# values.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_beams": ("answers are not searched for with beams", (1,)),
    "guidance_scale": ("no second, unconditional pass is run", (1,)),
    "max_time": ("kvsieve serve --seconds is the limit of time", ()),
}


class Preparer:
    """Makes the scheduler's orders from requests, in any thread.

    Attributes:
        token_bytes: returns a token's bytes; needs no lock.
        grammars: compiles grammars of requests; to be closed.

    Args:
        model: of transformers, with its generation config.
        tokenizer: of the model.
        plans: plans that requests may select.
        limits: of requests.
        context: tokens of the model's context, None if unlimited.
        processor: of a composite model; None to refuse images.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        plans: AllowedPlans,
        limits: ServerLimits,
        context: int | None = None,
        processor: Any = None,
    ) -> None:
        # Tokenizing briefly changes settings of the tokenizer, so decoding uses a copy without a lock.
        self.tokenizer = copy.deepcopy(tokenizer)
        if processor is not None and isinstance(processor.chat_template, str):
            self.tokenizer.chat_template = processor.chat_template
        self.plans = plans
        self.limits = limits
        self.token_bytes, self._text_of = token_bytes(tokenizer), partial(text_of, tokenizer)
        config = model.generation_config
        check_generation_config(model)
        self._default = config.max_new_tokens
        own = config.stop_strings
        self._stop_texts = [own] if isinstance(own, str) else list(own or [])
        self._stops = stop_ids(self.tokenizer, config.eos_token_id)
        self._controls = {word.content: token for token, word in tokenizer.added_tokens_decoder.items() if word.special}
        self._added = {word.content: token for token, word in tokenizer.added_tokens_decoder.items()}
        self._forms = forms_of(self.tokenizer)
        self._words = model.get_input_embeddings().num_embeddings
        self._context = context
        self._lock = threading.Lock()
        self.grammars = Grammars(tokenizer)
        self._images = None
        if processor is not None:
            self._images = ImageReader(processor, model, self.tokenizer, self._ids, limits)

    def chat(self, request: ChatRequest, owner: str, chain: str | None = None) -> Order:
        """Return the order of a chat. chain: see Order. Raises InputError, PlanError."""
        limits = self.limits
        if len(request.messages) > limits.messages:
            raise InputError(f"messages: at most {limits.messages} are taken here, got {len(request.messages)}")
        if not self.tokenizer.chat_template:
            raise InputError("the model has no chat template; use /v1/completions")
        files: list[ImageFile] | None = None if self._images is None else []
        numbered = enumerate(request.messages)
        messages = [
            template_message(message, f"messages.{number}", files, self._forms.member) for number, message in numbered
        ]
        tools = [template_tool(tool) for tool in request.tools or ()] if request.tool_choice != "none" else []
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        if request.top_logprobs is not None and not request.logprobs:
            raise InputError("top_logprobs: needs logprobs to be true")
        if request.return_progress and not request.stream:
            raise InputError("return_progress: needs stream to be true")
        options = template_options(request, self.tokenizer)
        self._check_length("\n".join(all_texts(request.model_dump(include=_TEXTS))))
        rendered = partial(self._rendered, tools=tools or None, options=options)
        images = documents = None
        if pieces := checked_documents(request.kv, limits.documents, bool(files)):
            messages = with_documents(messages, pieces)
        if files:
            text, ids, images = self._with_images(request, parted(messages), rendered, [*tools, options], files)
        else:
            text = rendered(messages)
            if pieces and request.kv is not None:
                pieces = [escaped(self.tokenizer, piece) for piece in pieces]
                documents, ids = split_prompt(text, pieces, request.kv, self._ids)
            else:
                ids = self._ids(text)
        spans, question = self._spans(request, messages, rendered, text)
        form = self._forms.answer(
            text, tools, request.parallel_tool_calls is False, isinstance(request.tool_choice, NamedTool)
        )
        shown = frozenset(self._controls[name] for name in form.controls if name in self._controls)
        reasoning = None if form.reasoning is None else form.reasoning.tokens(self._added)
        order = self._order(request, ids, owner, logprobs, request.max_completion_tokens)
        order = replace(order, edits=self.plans.edits_of(request.kv, chain), chain=chain, documents=documents)
        constraints = _within(PromptConstraints(spans, None, question), len(ids))
        grammar = self._grammar(request, form, tools)
        order = replace(order, constraints=constraints, form=form, reasoning=reasoning, grammar=grammar)
        return replace(order, shown=order.shown | shown, progress=bool(request.return_progress), images=images)

    def _with_images(
        self,
        request: ChatRequest,
        messages: list[dict[str, Any]],
        rendered: Callable[..., str],
        others: list[Any],
        files: list[ImageFile],
    ) -> tuple[str, list[int], PromptImages]:
        """Return the rendered chat, its token ids and its images. others: texts that are in no message."""
        assert self._images is not None
        if len(files) > self.limits.images:
            raise InputError(f"messages: at most {self.limits.images} images are taken here, got {len(files)}")
        kv = request.kv
        if kv is not None and (kv.protect is not None or kv.question):
            raise InputError("kv: protect and question count tokens of texts; leave them out, or leave the images out")
        plan = self.plans.of(kv)
        if plan.shortens_prompt or plan.probes or plan.drafts:
            raise InputError(
                f"kv.method: {plan.name} reads the prompt in steps of its own, which have no images; take another "
                "method, or leave the images out"
            )
        self._images.check_texts(list(all_texts([*messages, *others])))
        text = rendered(messages)
        return (text, *self._images.prompt(text, files))

    def _grammar(self, request: ChatRequest, form: AnswerForm, tools: list[dict[str, Any]]) -> CompiledGrammar | None:
        """Return the grammar of a chat's answers, free reasoning and offered calls included; None for free answers."""
        forced = forced_tools(request, tools)
        if forced and form.calls is None:
            raise InputError(
                "tool_choice: the model's chat template writes calls in no form that is known here, so none can be "
                "forced; leave it out"
            )

        def placed(grammar: Grammar) -> Grammar:
            if form.calls is None and form.reasoning is None:
                return grammar
            return Grammar.lark(form.matching(self._added, grammar.symbol, tools))

        calls = partial(form.forced_calls, self._added, forced) if forced else None
        return self.grammars.of(request, placed, calls)

    def completion(self, request: CompletionRequest, owner: str) -> list[Order]:
        """Return the orders of a completion, one per prompt. Raises InputError, PlanError."""
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise InputError("best_of: answers are not ranked here; leave it out, or give what n is")
        if request.echo and request.logprobs is not None:
            raise InputError("echo: the prompt's logprobs are not computed here; leave echo or logprobs out")
        prompt = request.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts: list[Any] = list(prompt) if several and prompt else [prompt]
        if len(prompts) > self.limits.answers:
            raise InputError(f"prompt: at most {self.limits.answers} prompts are taken at once, got {len(prompts)}")
        if len(prompts) > 1 and request.kv is not None and request.kv.session is not None:
            raise InputError("kv.session: several prompts are not one conversation; send one, or leave the session out")
        grammar = self.grammars.of(request)
        orders = []
        for one_prompt in prompts:
            ids = self._prompt_ids(one_prompt, parse_special=request.parse_special is not False)
            if not ids or not all(0 <= token < self._words for token in ids):
                raise InputError(f"prompt: expected a text, or token ids from 0 to {self._words - 1}, at least one")
            order = self._order(request, ids, owner, request.logprobs, None)
            constraints = _within(PromptConstraints(*_plain_constraints(request)), len(ids))
            # A text is echoed as it was sent, not as its tokens decode.
            echo = (one_prompt if isinstance(one_prompt, str) else self._text_of(ids)) if request.echo else ""
            order = replace(order, constraints=constraints, continues=True, echo=echo, grammar=grammar)
            orders.append(replace(order, edits=self.plans.edits_of(request.kv, None)))
        return orders

    def _prompt_ids(self, prompt: str | list[int] | None, parse_special: bool) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(prompt)
            with self._lock:
                return plain_ids(self.tokenizer, prompt, parse_special)
        if prompt is not None:
            return list(prompt)
        # As OpenAI has it: the beginning of a new document.
        begins = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return [token for token in begins if token is not None][:1]

    def tokens(self, request: TokenizeRequest) -> list[int]:
        if request.add_special_tokens is not False:
            return self._prompt_ids(request.prompt, parse_special=True)
        self._check_length(request.prompt)
        return self._ids(request.prompt)

    def text(self, ids: tuple[int, ...]) -> str:
        return self._text_of(ids)

    def _rendered(
        self, messages: list[dict[str, Any]], ask: bool = True, tools: Any = None, options: Any = None
    ) -> str:
        with self._lock:
            return render(self.tokenizer, messages, ask, tools=tools, options=options)

    def _ids(self, text: str, follows: bool = False) -> list[int]:
        with self._lock:
            return token_ids(self.tokenizer, text, follows)

    def _check_length(self, text: str) -> None:
        """Raise InputError for a text far beyond the context, before more than twice the context's tokens are made.

        While tokenizing, a token takes hundreds of bytes, as does each character of an endless word.
        """
        context = self._context or _ENDLESS
        most = 2 * context
        if len(text) <= 2 * most:
            return
        if len(text) > _CHARACTERS * context:
            raise InputError(
                f"the prompt has {len(text)} characters, more than {_CHARACTERS} for each of the {context} tokens of "
                "the model's context; send less"
            )
        tokens = 0
        for begin in range(0, len(text), _PIECE):
            with self._lock:
                piece = self.tokenizer(text[begin : begin + _PIECE], add_special_tokens=False, verbose=False)
            tokens += len(piece["input_ids"])
            if tokens > most:
                raise InputError(f"the prompt has more than {most} tokens, twice the model's context; send less")

    def _order(
        self, request: CommonRequest, ids: list[int], owner: str, logprobs: int | None, most: int | None
    ) -> Order:
        limits = self.limits
        kv = request.kv
        wanted = most or request.max_tokens or min(self._default or limits.max_tokens, limits.max_tokens)
        if wanted > limits.max_tokens:
            name = "max_completion_tokens" if most else "max_tokens"
            raise InputError(f"{name}: at most {limits.max_tokens} here, got {wanted}")
        if most and request.max_tokens not in (None, most):
            raise InputError(
                f"max_tokens: {request.max_tokens} is another limit than max_completion_tokens={most}; leave one of "
                "them out"
            )
        answers = request.n or 1
        if answers > limits.answers:
            raise InputError(f"n: at most {limits.answers} here, got {answers}")
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stops) > limits.stops or not all(stops):
            raise InputError(f"stop: at most {limits.stops} texts, none of them empty")
        plan = self.plans.of(kv)
        draft = self.plans.draft_of(kv)
        doubt = None if kv is None else percent_doubt(kv.budget)
        return Order(
            ids=tuple(ids),
            plan=plan,
            max_tokens=wanted,
            sampling=self._sampling(request, logprobs),
            answers=answers,
            stops=(*stops, *self._stop_texts),
            # Texts of answers have no control tokens but those of the form, and those that are stops.
            stop_ids=self._stops,
            shown=frozenset(self._controls[stop] for stop in stops if stop in self._controls),
            owner=owner,
            session=None if kv is None else kv.session,
            bins=0 if kv is None else kv.map or 0,
            ignore_eos=bool(request.ignore_eos),
            notes=() if doubt is None else (doubt,),
            draft=draft,
        )

    def _sampling(self, request: CommonRequest, logprobs: int | None) -> Sampling:
        bias = request.logit_bias or {}
        if not all(name.isdecimal() and int(name) < self._words for name in bias):
            raise InputError(f"logit_bias: expected token ids from 0 to {self._words - 1}")
        return Sampling(
            temperature=0.0 if request.temperature is None or request.temperature < _COLD else request.temperature,
            top_p=request.top_p,
            top_k=None if request.top_k is None else max(request.top_k, 0),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            bias=tuple((int(name), value) for name, value in bias.items()),
            seed=request.seed,
            logprobs=logprobs,
        )

    def _spans(
        self, request: ChatRequest, messages: list[dict[str, Any]], rendered: Callable[..., str], text: str
    ) -> tuple[list[tuple[int, int]] | None, int | None]:
        """Return the spans of protected messages, and the tokens of the question hidden from the plan."""
        kv = request.kv
        if kv is None or (kv.protect is None and not kv.question):
            return None, None

        def until(count: int) -> int:
            if not count:
                return 0
            before = rendered(messages[:count], ask=False)
            if not text.startswith(before):
                raise InputError("kv: the model's template rewrites messages, so those to protect cannot be found")
            return len(self._ids(before))

        spans = []
        for place in kv.protect or ():
            if not isinstance(place, int) or not -len(messages) <= place < len(messages):
                raise InputError(f"kv.protect: expected numbers of messages, below {len(messages)}; got {place}")
            number = place % len(messages)
            spans.append((until(number), until(number + 1)))
        question = kv.question or None
        if question is True:
            question = len(self._ids(text)) - until(len(messages) - 1)
        return spans or None, question


def _plain_constraints(request: CompletionRequest) -> tuple[list[tuple[int, int]] | None, None, int | None]:
    kv = request.kv
    if kv is None:
        return None, None, None
    if kv.documents is not None or kv.join is not None:
        raise InputError("kv.documents: a completion has no messages that documents stand before; send a chat")
    if kv.question is True or any(isinstance(part, int) for part in kv.protect or ()):
        raise InputError("kv: a completion has no messages: give protect as spans of tokens, question as their number")
    return [part for part in kv.protect or () if not isinstance(part, int)] or None, None, kv.question or None


def _within(constraints: PromptConstraints, count: int) -> PromptConstraints:
    """Return the constraints of a prompt of `count` tokens. Raises InputError for those that it cannot have."""
    question = constraints.question_tokens or 0
    if question >= count:
        raise InputError(
            f"kv.question: the {question} tokens of the question leave nothing of the prompt's {count} to the plan; "
            "send the context before it, or leave kv.question out"
        )
    for start, end in constraints.protect or ():
        if not 0 <= start < end <= count:
            raise InputError(
                f"kv.protect: a span is (start, end) with 0 <= start < end <= {count}, the prompt's tokens; got "
                f"{(start, end)}"
            )
    return constraints


def check_generation_config(model: Any) -> None:
    """Raise UnsupportedOptionError if a checkpoint's generation_config has settings that the server cannot honour."""
    config = config_in_effect(model)
    for name, (reason, nothing) in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in nothing:
            raise UnsupportedOptionError(
                f"{who_says(model, {}, name)} is not supported by a server: {reason}; take it out of "
                "generation_config.json"
            )
    try:
        check_config(model, {}, config)
    except UnsupportedOptionError as error:
        raise UnsupportedOptionError(f"{error}; for a server, take it out of generation_config.json") from error

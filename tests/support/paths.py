"""Every way in which kvsieve answers a question, as one table, so that a test of a promise goes through all of them.

A path takes an `Ask` and returns the answer's text. All paths feed the same tokens: the question as one user message
under the tokenizer's chat template. LIBRARY, EVALUATION, COMMANDS and SERVED group them.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import httpx
import torch
import transformers

import kvsieve
import toy_words
from kvsieve.planning.specs import split_specs
from kvsieve.planning.turns import render, stop_ids, token_ids
from served_apps import listening
from toy_chats import chat_tokenizer


@dataclass(frozen=True)
class Ask:
    """A question and how it is answered.

    Attributes:
        model: a tiny model.
        text: the question, words of the tokenizer.
        method: a method as the command line writes it, such as "snapkv:window=4:paper=true".
        budget: its budget.
        tokens: longest answer.
        chunk: prompt tokens per forward pass where a path reads in chunks.
        tokenizer: with a chat template.
    """

    model: Any
    text: str
    method: str = "full"
    budget: str | int | None = None
    tokens: int = 8
    chunk: int = 16
    tokenizer: Any = field(default_factory=chat_tokenizer)

    @property
    def plan(self) -> kvsieve.Plan:
        ((name, given),) = split_specs(self.method)
        return kvsieve.plan(name, **({} if self.budget is None else {"budget": self.budget}), **given)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor([token_ids(self.tokenizer, render(self.tokenizer, self.messages))])

    @property
    def options(self) -> dict[str, Any]:
        """Options of generate that a chat has as well: its end tokens, greedy."""
        ends = stop_ids(self.tokenizer, self.model.generation_config.eos_token_id)
        return {"eos_token_id": sorted(ends), "pad_token_id": 0, "max_new_tokens": self.tokens, "do_sample": False}

    def said(self, sequence: torch.Tensor) -> str:
        """The answer at the end of a row of tokens."""
        return self.tokenizer.decode(sequence[self.ids.shape[1] :], skip_special_tokens=True).strip()


def plain(ask: Ask) -> str:
    """What transformers answers without kvsieve: the reference under full KV."""
    return ask.said(ask.model.generate(ask.ids, attention_mask=torch.ones_like(ask.ids), **ask.options)[0])


def _generate(ask: Ask, **how: Any) -> str:
    with kvsieve.attach(ask.model, ask.plan, tokenizer=ask.tokenizer) as sieve:
        mask = torch.ones_like(ask.ids)
        return ask.said(sieve.generate(ask.ids, mask, **how, **ask.options).sequences[0])


def _inside(ask: Ask) -> str:
    """A plain model.generate inside the block."""
    with kvsieve.attach(ask.model, ask.plan, tokenizer=ask.tokenizer):
        return plain(ask)


def _padded(ask: Ask) -> str:
    """A row of a batch, beside a longer one."""
    ids, length = ask.ids, ask.ids.shape[1] + 7
    longer = torch.cat([ids[:, :7].flip(1).clamp_min(3), ids], 1)
    both = torch.cat([torch.cat([ids.new_zeros(1, 7), ids], 1), longer])
    mask = torch.ones_like(both)
    mask[0, :7] = 0
    with kvsieve.attach(ask.model, ask.plan, tokenizer=ask.tokenizer) as sieve:
        out = sieve.generate(both, mask, **ask.options).sequences[0, length:]
    ends = ask.options["eos_token_id"]
    made = next((out[:at] for at, token in enumerate(out.tolist()) if token in ends), out)
    return ask.tokenizer.decode(made, skip_special_tokens=True).strip()


def _pipeline(ask: Ask, *others: Ask) -> str:
    """transformers' own pipeline inside the block, all asks in one batch."""
    rows = [each.messages for each in (ask, *others)]
    with kvsieve.attach(ask.model, ask.plan, tokenizer=ask.tokenizer):
        writer = transformers.pipeline("text-generation", model=ask.model, tokenizer=ask.tokenizer)
        made = writer(rows, return_full_text=False, batch_size=len(rows), **ask.options)
        return made[0][0]["generated_text"].strip()


def _harness(ask: Ask, *others: Ask) -> str:
    """lm-evaluation-harness's requests of answers, in one batch."""
    from lm_eval.api.instance import Instance

    from kvsieve.lab.eval.lm_eval_model import KvsieveLM

    ((name, given),) = split_specs(ask.method)
    arguments = {"chunk": ask.chunk, **given}
    if ask.budget is not None:
        arguments["budget"] = ask.budget
    rows, until = (ask, *others), {"until": [], "max_gen_toks": ask.tokens}
    judged = KvsieveLM(pretrained=ask.model, tokenizer=ask.tokenizer, method=name, batch_size=len(rows), **arguments)
    prompts = [render(ask.tokenizer, each.messages) for each in rows]
    requests = [Instance("generate_until", {}, (prompt, until), at) for at, prompt in enumerate(prompts)]
    return judged.generate_until(requests, disable_tqdm=True)[0].strip()


def _begun(ask: Ask) -> str:
    """The beginning is read first."""
    with kvsieve.attach(ask.model, ask.plan, tokenizer=ask.tokenizer) as sieve:
        cache = sieve.begin(ask.ids[:, : ask.ids.shape[1] // 2])
        return ask.said(sieve.generate(ask.ids, cache=cache, **ask.options).sequences[0])


def _chat(ask: Ask) -> str:
    with kvsieve.attach(ask.model, ask.plan) as sieve:
        return sieve.chat(ask.tokenizer, max_new_tokens=ask.tokens, chunk=ask.chunk).ask(ask.text).text


def _stored_chat(ask: Ask) -> str:
    """A chat that finds the beginning of its prompt in a store."""
    from kvsieve.store import PrefixStore

    with kvsieve.attach(ask.model, ask.plan) as sieve, PrefixStore() as store:
        for _ in range(2):
            chat = sieve.chat(ask.tokenizer, store=store, max_new_tokens=ask.tokens, chunk=ask.chunk)
            text = chat.ask(ask.text).text
        return text


def _evaluated(ask: Ask, *others: Ask) -> str:
    """`kvsieve eval`, the question visible; plans of others are asked the same."""
    from kvsieve.lab.eval.evaluator import Evaluator
    from kvsieve.lab.tasks.samples import QuestionAnswer, Sample

    words = ask.text.split(" ")
    turn = QuestionAnswer(" ".join(words[-3:]), ("w1",), lambda answer, right: {"score": 0.0}, ask.tokens)
    sample = Sample(" ".join(words[:-3]), (turn,))
    evaluator = Evaluator(ask.model, ask.tokenizer, chunk=ask.chunk)
    plans = [kvsieve.plan("full"), ask.plan, *(each.plan for each in others)]
    return evaluator.run(sample, plans, "visible")[1].answers[0]


def _command(ask: Ask, *arguments: str, stdin: str = "") -> str:
    """Standard output of `kvsieve ...` on a checkpoint of the model."""
    from kvsieve.cli.main import run_cli

    budget = [] if ask.budget is None else ["--budget", str(ask.budget)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        ask.model.save_pretrained(folder)
        ask.tokenizer.save_pretrained(folder)
        how = ["--method", ask.method, *budget, "--chunk", str(ask.chunk), "--max-new-tokens", str(ask.tokens)]
        with mock.patch.object(sys, "stdin", io.StringIO(stdin)):
            try:
                run_cli([arguments[0], folder, *how, "--dtype", "checkpoint", *arguments[1:]])
            except SystemExit as left:
                if left.code not in (0, None):
                    raise AssertionError(f"kvsieve {arguments[0]} ended with {left.code}") from left
    return out.getvalue()


def _run_command(ask: Ask) -> str:
    return json.loads(_command(ask, "run", "--prompt", ask.text, "--json"))["results"][-1]["answer"]


def _run_file_command(ask: Ask, *others: Ask) -> str:
    """`kvsieve run` over a file of prompts, which are answered together."""
    texts = [each.text for each in (ask, *others)] if others else [ask.text, f"{ask.text} w3 w4"]
    rows = _command(ask, "run", "--prompts-file", "-", stdin="\n".join(texts)).splitlines()
    return json.loads(rows[0])["answer"]


def _chat_command(ask: Ask) -> str:
    return json.loads(_command(ask, "chat", "--json", stdin=f"{ask.text}\n"))["answer"].strip()


@contextlib.contextmanager
def serving(ask: Ask, **given: Any) -> Iterator[str]:
    """The address of a live server of the model under the plan."""
    from kvsieve.serve.limits import ServerLimits
    from kvsieve.serve.run import ServerOptions, application

    limits = ServerLimits(chunk=ask.chunk, max_tokens=max(64, ask.tokens))
    options = ServerOptions(ask.plan, ask.method, ask.budget, limits=limits, **given)
    with application(ask.model, ask.tokenizer, options, "tiny") as app, listening(app) as url:
        yield url


def _post(url: str, path: str, ask: Ask, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": ask.tokens, "temperature": 0, **body}
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _completions(ask: Ask, *others: Ask) -> str:
    """Beside other prompts of the request."""
    with serving(ask) as url:
        prompt = [each.ids[0].tolist() for each in (ask, *others)]
        return _post(url, "/v1/completions", ask, prompt=prompt)["choices"][0]["text"].strip()


def chat_reply(url: str, ask: Ask, **more: Any) -> str:
    """The answer of `/v1/chat/completions` of a live server."""
    body = {"messages": ask.messages, **more}
    return _post(url, "/v1/chat/completions", ask, **body)["choices"][0]["message"]["content"].strip()


def _chat_completions(ask: Ask, times: int = 1, **more: Any) -> str:
    with serving(ask) as url:
        return [chat_reply(url, ask, **more) for _ in range(times)][-1]


def streamed(url: str, ask: Ask) -> str:
    """The same, streamed."""
    body = {"model": "tiny", "max_tokens": ask.tokens, "temperature": 0, "messages": ask.messages, "stream": True}
    lines = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]).strip()


def _stream(ask: Ask) -> str:
    with serving(ask) as url:
        return streamed(url, ask)


PATHS: dict[str, Callable[[Ask], str]] = {
    "generate": _generate,
    "chunks": lambda ask: _generate(ask, chunk=ask.chunk),
    "model.generate": _inside,
    "pipeline": _pipeline,
    "padded row": _padded,
    "begin": _begun,
    "chat": _chat,
    "chat with a store": _stored_chat,
    "evaluation": _evaluated,
    "lm-eval": _harness,
    "run": _run_command,
    "run --prompts-file": _run_file_command,
    "chat command": _chat_command,
    "completions": _completions,
    "chat completions": _chat_completions,
    "chat completions, read before": lambda ask: _chat_completions(ask, times=2),
    "session": lambda ask: _chat_completions(ask, kv={"session": "one"}),
    "stream": _stream,
}

LIBRARY = ("generate", "chunks", "model.generate", "pipeline", "padded row", "begin", "chat", "chat with a store")
EVALUATION = ("evaluation", "lm-eval")
COMMANDS = ("run", "run --prompts-file", "chat command")
SERVED = ("completions", "chat completions", "chat completions, read before", "session", "stream")
assert {*PATHS} == {*LIBRARY, *EVALUATION, *COMMANDS, *SERVED}


def words(count: int, seed: int = 0) -> str:
    return toy_words.words(seed, count)


def answer(path: str, ask: Ask, **changed: Any) -> str:
    """The answer of a path, by its name."""
    return PATHS[path](replace(ask, **changed))

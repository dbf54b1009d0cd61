"""Shares of attention, linear layers, and the rest in the time of prefill and decode."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from kvsieve.hf.compat import AttentionInterface
from kvsieve.hf.forward.attention import register

ATTENTION = "attention"
WEIGHTS = "weights"
REST = "rest"
PROMPT = "prompt"
TOKEN = "token"


class Spending:
    """Attributes the time from `start` to `close` to the running part, without overlap.

    Attention is the attention function: under kvsieve including storing, choosing and evicting. Weights are the linear
    layers. All else, such as norms and Python, is the rest. For CPUs only: a GPU runs asynchronously.

    Attributes:
        seconds: of "prompt" and "token", by "attention", "weights" and "rest".
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.seconds = {phase: dict.fromkeys((ATTENTION, WEIGHTS, REST), 0.0) for phase in (PROMPT, TOKEN)}
        self._phase = PROMPT
        self._running = [REST]
        self._since = 0.0
        self._handles: list[Any] = []
        self._functions: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        for module in self._model.modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter(WEIGHTS)))
                self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        register()
        self._functions = dict(AttentionInterface().items())
        for name, function in self._functions.items():
            AttentionInterface.register(name, self._timed(function))
        self._since = time.perf_counter()

    def answer(self) -> None:
        self._charge()
        self._phase = TOKEN

    def close(self) -> None:
        self._charge()
        for handle in self._handles:
            handle.remove()
        for name, function in self._functions.items():
            AttentionInterface.register(name, function)
        self._handles = []
        self._functions = {}

    def shares(self) -> dict[str, dict[str, float]]:
        """Return each part's share in its phase; phases without time are omitted."""
        found = {}
        for phase, spent in self.seconds.items():
            total = sum(spent.values())
            if total > 0:
                found[phase] = {name: seconds / total for name, seconds in spent.items()}
        return found

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(ATTENTION)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def _enter(self, what: str) -> None:
        self._charge()
        self._running.append(what)

    def _leave(self) -> None:
        self._charge()
        self._running.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._phase][self._running[-1]] += now - self._since
        self._since = now

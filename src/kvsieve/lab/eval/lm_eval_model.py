"""lm-evaluation-harness runs its tasks under a kvsieve plan: ``--model kvsieve``.

    kvsieve-lm-eval --model kvsieve --model_args pretrained=DIR,method=snapkv,budget=20%,kernel=21 --tasks ...

Importing this module registers the model. A harness that loads the entry-point group ``lm_eval.models`` imports it;
release 0.4.13 does not, so the command ``kvsieve-lm-eval`` imports it before it starts the harness.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

try:
    from lm_eval.api.registry import register_model

    # Imported here, not from the defining file: that moved between releases.
    from lm_eval.models.huggingface import HFLM, get_dtype, stop_sequences_criteria
except ImportError as error:
    raise ImportError(
        f"lm-evaluation-harness and its Hugging Face extra are needed ({error}); pip install 'kvsieve[lm-eval]'"
    ) from error

from kvsieve import models
from kvsieve.errors import KvsieveWarning, PlanError, UnsupportedOptionError
from kvsieve.hf.attach import Sieve, attach
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.model.context import context_of
from kvsieve.hf.model.support import check_model
from kvsieve.lab.eval import loglikelihood
from kvsieve.lab.eval.loglikelihood import ScoredContext
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import list_methods, method_info
from kvsieve.planning.suggestions import did_you_mean
from kvsieve.version import __version__

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_log = logging.getLogger(__name__)
_CACHE_KEY = "kvsieve_plan"
# Arguments of `kvsieve.plan` for any method.
_STORED = ("codec", "rest", "prefill")


@register_model("kvsieve")
class KvsieveLM(HFLM):
    """The harness's own Hugging Face model, answering and scoring under a plan.

    pretrained: as for ``--model hf`` (a directory, a hub id, a loaded model), or "demo", kvsieve's demo model. method,
    and the method's parameters: as in ``kvsieve.plan("snapkv", budget="20%", kernel=21)``; codec=kivi:bits=4 is valid
    for any. chunk: prompt tokens per forward pass, None for all at once. device: default "cuda" if available, else
    "cpu". Other arguments are passed to HFLM.

    Raises PlanError for a missing or unknown method and for an argument unknown to both the method and HFLM, and
    UnsupportedModelError, before anything runs, for a model that the plan cannot run on.
    """

    def __init__(
        self,
        pretrained: Any = "demo",
        method: str | None = None,
        chunk: int | None = None,
        **arguments: Any,
    ) -> None:
        self.plan, arguments = _split(method, arguments)
        self.chunk = chunk
        self.calls: list[Stats | ScoredContext] = []
        self._sieve: Sieve | None = None
        if arguments.get("device") is None:
            # HFLM would use "cuda" even if unavailable.
            arguments["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        if pretrained == "demo":
            dtype = get_dtype(arguments.pop("dtype", None) or "auto")
            pretrained, tokenizer = models.load(None, dtype, arguments.pop("device"))
            arguments.setdefault("tokenizer", tokenizer)
        super().__init__(pretrained=pretrained, **arguments)
        context = context_of(self.model.config)
        config = self.model.config.get_text_config(decoder=True)
        if arguments.get("max_length") is None and context != getattr(config, "max_position_embeddings", None):
            # HFLM would cut prompts at the context length without rotary scaling.
            self._max_length = context
        self.plan = self.plan.for_model(self.model, self.tokenizer)
        check_model(self.model, self.plan)
        _log.info("kvsieve plan: %s", json.dumps(self.plan.to_dict()))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As HFLM's. Warns (KvsieveWarning) if the plan acted on no prompt, or not on all."""
        before = len(self.calls)
        with attach(self.model, self.plan) as sieve:
            self._sieve = sieve
            try:
                answers = super().generate_until(requests, disable_tqdm=disable_tqdm)
            finally:
                self._sieve = None
        self._report(self.calls[before:])
        return answers

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        if self._sieve is None:
            raise UnsupportedOptionError("kvsieve generates inside generate_until only, where the plan is attached")
        temperature = options.pop("temperature", 0.0)
        if options.setdefault("do_sample", temperature > 0):
            options["temperature"] = temperature
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            result = self._sieve.generate(
                context,
                attention_mask,
                chunk=self.chunk,
                max_new_tokens=max_length - context.shape[1],
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )
        self.calls.append(result.stats)
        return result.sequences

    def _report(self, calls: Sequence[Stats | ScoredContext]) -> None:
        idle = [call for call in calls if not call.applied]
        if not idle:
            return
        longest = max(call.prompt_tokens for call in idle)
        what = "contexts" if isinstance(idle[0], ScoredContext) else "batches"
        which = "on none" if len(idle) == len(calls) else f"on {len(calls) - len(idle)}"
        warnings.warn(
            f"{self.plan.name} acted {which} of {len(calls)} {what}, so the others' answers are full KV's: "
            f"{idle[-1].notes[0]} (longest such prompt: {longest} tokens); use longer prompts or a smaller budget",
            KvsieveWarning,
            stacklevel=3,
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """As HFLM's under full KV; else each context is prefilled once under the plan, see `loglikelihood.score`."""
        if not self.plan.roles:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        pairs = [loglikelihood.split(context, continuation, self.max_length) for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        before = len(self.calls)
        mixed = self.mixed_precision_dtype
        progress = tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        with warnings.catch_warnings(), progress:
            # `_report` reports a context that is too short, once.
            warnings.simplefilter("ignore", KvsieveWarning)
            for context, same in loglikelihood.by_context(pairs):
                with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
                    scored = loglikelihood.score(
                        self.model,
                        self.plan,
                        context,
                        [pairs[index][1] for index in same],
                        chunk=self.chunk,
                        dtype=self.softmax_dtype,
                    )
                self.calls.append(scored)
                for index, result in zip(same, scored.scores, strict=True):
                    found[index] = result
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], result)
                progress.update(len(same))
        self._report(self.calls[before:])
        if not loglikelihood.changes_first_token(self.plan) and all(len(answer) == 1 for _, answer in pairs):
            warnings.warn(
                f"every continuation is one token, and {self.plan.name} first acts on the second: a context is read "
                "with full KV before it is reduced, so these numbers are full KV's; take a task with longer answers",
                KvsieveWarning,
                stacklevel=2,
            )
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """HFLM's under full KV. Raises UnsupportedOptionError under any other plan."""
        if self.plan.roles:
            tasks = sorted({name for request in requests if (name := getattr(request, "task_name", None))})
            raise UnsupportedOptionError(
                f"{', '.join(tasks) or 'the task'} asks for loglikelihood_rolling, the likelihood of a whole text: it "
                f"has no context that {self.plan.name!r} could reduce, and its parts could not be scored alone, since "
                "the harness divides by the words of all of it. Take a loglikelihood, multiple_choice or "
                "generate_until task, or method=full"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """As HFLM's. Raises UnsupportedOptionError for a ``--use_cache`` file with answers of another plan."""
        answers = cache_hook.dbdict
        if answers is not None:
            plan_key = json.dumps(self.plan.to_dict(), sort_keys=True)
            if len(answers) and answers.get(_CACHE_KEY) != plan_key:
                raise UnsupportedOptionError(
                    "the --use_cache file holds answers of another plan or model type "
                    f"({answers.get(_CACHE_KEY) or 'not written by kvsieve'}), and the harness would return them as "
                    f"those of {self.plan.name!r}; use one file per plan"
                )
            answers[_CACHE_KEY] = plan_key
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """As HFLM's, with the plan and its effects under "kvsieve": part of the result file's "config"."""
        calls = self.calls
        shares = [call.kv_share for call in calls if call.kv_share is not None]
        return super().get_model_info() | {
            "kvsieve": {
                "version": __version__,
                "plan": self.plan.to_dict(),
                "chunk": self.chunk,
                "batches": len(calls),
                "batches_applied": sum(call.applied for call in calls),
                "longest_prompt_tokens": max((call.prompt_tokens for call in calls), default=0),
                "mean_kv_share": sum(shares) / len(shares) if shares else None,
            }
        }


def _split(method: str | None, arguments: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan in --model_args, and the remaining arguments for HFLM."""
    if method is None:
        raise PlanError(f"--model_args names no method; add method=..., one of {', '.join(list_methods())}")
    info = method_info(method)
    known = [name for name in inspect.signature(HFLM.__init__).parameters if name not in ("self", "kwargs")]
    parameters = {name: value for name, value in arguments.items() if name in info.parameters or name in _STORED}
    rest = {name: value for name, value in arguments.items() if name not in parameters}
    for name in rest:
        if name not in known:
            # HFLM would pass it to from_pretrained, which ignores misspelt parameters.
            close = did_you_mean(name, [*info.parameters, *_STORED, "chunk", *known]).partition(" (")[0]
            takes = ", ".join([*info.parameters, *_STORED, "chunk"])
            raise PlanError(
                f"neither {info.name} nor the harness's Hugging Face model has an argument {name!r}{close} "
                f"({info.name} takes {takes}); for other options of from_pretrained, load the model yourself and pass "
                "it as KvsieveLM(pretrained=model, tokenizer=tokenizer)"
            )
    return plan_without_floor(info.name, **parameters), rest

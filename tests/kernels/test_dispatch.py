"""Where kernels run and where they do not, and that whole models answer the same with them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import kvsieve
from kvsieve import kernels
from kvsieve.kernels import blocks, choice, decode, packed, paged, pages, window
from tiny import tiny_model, tiny_prompt

PLANS = {
    "full": {},
    "snapkv": {"budget": 30, "window": 5, "pooling": "max"},
    "adakv": {"budget": 30, "window": 5},
    "hsa": {"budget": 16},
    "quest": {"budget": 16, "page": 4, "per_query_head": True},
    "rocketkv-mt": {"budget": 16, "window": 4, "kernel": 5},
    "xattention": {"block": 16, "queries": 32, "least": 32, "local": 0, "full": 0, "threshold": 0.5},
}
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32, num_hidden_layers=2)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_model_answers_the_same(model, name, monkeypatch):
    """Two prompts of unequal lengths in a batch; `launched` keeps the test honest."""
    launched, run = set(), InterpretedFunction.run
    spy = lambda self, *args, **kwargs: launched.add(self.__name__) or run(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(InterpretedFunction, "run", spy)
    ids = tiny_prompt(2, 60, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    answers = []
    for on in (True, False):
        monkeypatch.setattr(kernels, "_interpreted", on)
        with kvsieve.attach(model, kvsieve.plan(name, **PLANS[name])):
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=3,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        answers.append(torch.stack(out.logits))
        if on:
            prompt = {"norm_kernel", "mass_kernel"} if "window" in PLANS[name] else set()
            prompt |= {"blocks_kernel"} if "block" in PLANS[name] else set()
            assert prompt | {"split_kernel"} <= launched
            launched.clear()
    assert not launched
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


def test_only_what_kernels_take(monkeypatch):
    x = torch.zeros(2)
    assert kernels.usable(x, x) and kernels.usable(x.bfloat16())
    assert not kernels.usable(x.double()) and not kernels.usable(x, x.long())
    monkeypatch.setattr(kernels, "_interpreted", False)
    assert not kernels.usable(x)


@pytest.fixture
def gpu(monkeypatch):
    """A device that need not be there, with reasons not remembered."""
    monkeypatch.setattr(kernels, "reason", kernels.reason.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("KVSIEVE_KERNELS", raising=False)
    assert kernels.reason(GPU) is None


def test_the_reason_names_what_is_missing(gpu, monkeypatch):
    assert "not on cpu" in kernels.reason(torch.device("cpu"))
    with monkeypatch.context() as old:
        old.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "7.5" in kernels.reason(GPU)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install triton" in kernels.reason(GPU)
    monkeypatch.setenv("KVSIEVE_KERNELS", "0")
    assert "KVSIEVE_KERNELS=0" in kernels.reason(GPU)


def test_every_function_is_found_and_others_are_not():
    modules = {
        "blocks": blocks, "choice": choice, "decode": decode, "packed": packed, "paged": paged, "pages": pages,
        "window": window,
    }  # fmt: skip
    for name, module in kernels._FUNCTIONS.items():
        assert getattr(kernels, name) is getattr(modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kernels.nothing

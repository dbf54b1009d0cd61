"""Drafts of a server's answers: allowed by its operator, chosen by requests, counted."""

from __future__ import annotations

import re

import httpx
import pytest

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.planning.drafts import Draft, as_draft
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import KVOptions
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer


def test_a_request_with_drafts_gets_the_same_answer_and_their_counts():
    options = ServerOptions(limits=ServerLimits(chunk=24), draft=as_draft("lookup:tokens=4:ngram=1:adapt=false"))
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7, 8] * 10,
        "max_tokens": 24,
        "temperature": 1,
        "seed": 5,
        "n": 2,
        "ignore_eos": True,
    }
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        with httpx.Client(base_url=url, timeout=120) as client:
            found = [
                client.post("/v1/completions", json={**body, "kv": kv}).json()
                for kv in (
                    None,
                    {"draft": "none"},
                    {"draft": "lookup:tokens=2:adapt=false"},
                    {"draft": "lookup:tokens=5"},
                )
            ]
            metrics = client.get("/metrics").text
            assert client.get("/v1/kv").json()["draft"] == "lookup:tokens=4:ngram=1:adapt=false"
    *answers, refused = found
    assert len({str(answer["choices"]) for answer in answers}) == 1
    assert "tokens=4 at most" in refused["error"]["message"]
    default, none, few = (answer["usage"]["kv"].get("drafted") for answer in answers)
    assert none is None and default["tokens"] > few["tokens"] and default["tokens"] > default["accepted"] > 0
    counted = {name: int(float(count)) for name, count in re.findall(r"kvsieve_(\w+)_total ([\d.]+)\n", metrics)}
    assert counted["drafted_tokens"] == default["tokens"] + few["tokens"]
    assert counted["accepted_tokens"] == default["accepted"] + few["accepted"]
    assert counted["new_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in answers) == 3 * 2 * 24
    assert 0 < counted["drafted_passes"] < counted["decode_passes"]


def allowed(draft):
    return AllowedPlans(kvsieve.Plan(), "full", None, (), False, lambda plan: plan, draft)


@pytest.mark.parametrize(
    ("own", "asked", "given"),
    [
        (None, None, None),
        (None, "none", None),
        ("lookup:tokens=8", None, Draft("lookup", tokens=8)),
        ("lookup:tokens=8", "none", None),
        ("lookup:tokens=8", "lookup", Draft("lookup", tokens=8)),
        ("lookup:tokens=8", "lookup:tokens=3:ngram=2", Draft("lookup", tokens=3, ngram=2)),
        ("/models/small", "model", Draft("model", model="/models/small")),
        ("/models/small", "lookup:tokens=2", Draft("lookup", tokens=2)),
        ("self:quest", "self:quest", Draft("self", view="quest")),
    ],
)
def test_requests_choose_within_what_the_operator_allows(own, asked, given):
    assert allowed(as_draft(own)).draft_of(None if asked is None else KVOptions(draft=asked)) == given


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        (None, "lookup"),
        ("lookup:tokens=8", "lookup:tokens=9"),
        ("lookup:tokens=8", "lookup:tokens=8:adapt=false"),
        ("lookup:tokens=8", "self:quest"),
        ("lookup:tokens=8", "/models/small"),
        ("/models/small", "/models/small"),
    ],
)
def test_other_drafts_are_refused_by_name(own, asked):
    with pytest.raises(PlanError, match=r"this server (allows the drafts none, |drafts no tokens).*'" + asked):
        allowed(as_draft(own)).draft_of(KVOptions(draft=asked))


def test_a_plan_that_the_default_draft_is_no_view_of_is_answered_without():
    options = ServerOptions(
        limits=ServerLimits(chunk=24), others=("adakv:window=4",), draft=as_draft("self:snapkv:budget=16:window=4")
    )
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7, 8] * 10,
        "max_tokens": 4,
        "kv": {"method": "adakv:window=4", "budget": 20},
    }
    with application(build("llama"), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        kv = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["usage"]["kv"]
    assert kv["drafted"] == {"tokens": 0, "accepted": 0}
    assert kv["notes"][-1].startswith("nothing was drafted: draft='self:snapkv' is no view of this cache: its heads")
    refused = ServerOptions(draft=as_draft("self:full"))
    with (
        pytest.raises(PlanError, match="full gives no view"),
        application(build("llama"), chat_tokenizer(), refused, ""),
    ):
        pass

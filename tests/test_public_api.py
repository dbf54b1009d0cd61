"""The public names and their signatures, written down: whoever changes one changes this file, and the changelog."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import kvsieve

NAMES = """
    Budget Evaluator Grammar KvsieveError KvsieveWarning Plan Sieve SieveCache __version__ attach list_methods
    method_info methods models plan register_method
"""
FUNCTIONS = """
    attach(model, plan, *, decode='auto', tokenizer=None)
    list_methods()
    method_info(name)
    plan(method, *, codec=None, rest=None, prefill=None, merge=None, **parameters)
    register_method(name, *, title, paper, phase, query_aware=None, summary='', budget=None, **rarely)
"""
MODELS = """
    cache_dir()
    fetch_demo(quiet=False, *, larger=False)
    load(model_id_or_dir, dtype='auto', device=None, weights=None, images=False)
    load_demo(dtype='auto')
"""
SIEVE = """
    adapters
    adopt(self, cache)
    ask(self, prompt, question=None, *, store=None, **options)
    begin(self, input_ids, *, cache=None, chunk=None, progress=None)
    chat(self, tokenizer, system=None, *, load=None, store=None, max_new_tokens=512, chunk=1024, **options)
    check_cache(self, cache)
    check_call(self, call)
    check_tokens(self, cache, new, text=None)
    continues
    edit(self, cache, input_ids, *, window=32)
    feed(self, cache, ids, mask, request=PassRequest(plan=None, phase=None, last_chunk=True, on_layer=None,
        before_attention=None, on_leave=None, chunk=None, tentative=False), *, logits=0)
    feeds_one_by_one(self, cache, plan=None)
    generate(self, input_ids, attention_mask=None, *, cache=None, chunk=None, progress=None, protect=None, quotas=None,
        question_tokens=None, reduce=None, measure=False, draft=None, grammar=None, **options)
    is_composite
    join(self, documents, before=None, *, kind='link:shift=true', question=None, store=None, owner='', chunk=None,
        progress=None)
    kept(self, cache, input_ids, *, row=0, tokenizer=None)
    load(self, path, *, tokenizer=None)
    new_cache(self)
    prefill(self, input_ids, attention_mask=None, *, cache=None, chunk=None, progress=None, protect=None, quotas=None,
        reduce=None)
    run_pass(self, session, call, logits)
    save(self, cache, path, *, tokenizer=None, ids=None, extra=None, force=False)
    use_tokenizer(self, tokenizer)
"""
CHAT = """
    ask(self, message, on_text=None, *, role='user', **options)
    cache
    context
    fork(self)
    ids
    kept
    messages
    read(self, text, **options)
    remove(self, turn, *, window=32)
    replace(self, turn, text, *, window=32)
    retry(self, on_text=None, **options)
    rollback(self, snapshot)
    save(self, path, *, force=False)
    snapshot(self)
    stream(self, message, *, role='user', **options)
    stream_retry(self, **options)
    strip(self, *, reasoning=True, tools_before=None, window=32)
    system
    turns
"""
FIELDS = {
    "GenerateResult": "sequences stats cache output token_s seen tokenizer prompt_columns ends",
    "Reply": "text tokens ended stats",
    "Saved": "cache ids extra",
    "Stats": """
        method applied prompt_tokens deep_tokens kv_entries kv_asked kv_bytes ttft_s tpot_s new_tokens peak_bytes notes
        report traffic storage decoding compressed_layers kv_share growing_layers codec prompt_density
        prompt_recall executors drafts edited
    """,
}


def lines(text: str) -> list[str]:
    """One signature per line; a deeper indented line goes on with the one before."""
    return text.strip("\n").replace("\n        ", " ").replace("    ", "").splitlines()


def written(name: str, member: object) -> str:
    """As a signature is written above: no annotations, and a property is its name."""
    if not callable(member):
        return name
    signature = inspect.signature(member)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return name + str(signature.replace(parameters=bare, return_annotation=signature.empty))


def members(owner: object, names: list[str] | None = None) -> list[str]:
    if names is None:
        bases = owner.__mro__[:-1] if inspect.isclass(owner) else [owner]
        names = list({name for base in bases for name in vars(base) if not name.startswith("_")})
    return [written(name, getattr(owner, name)) for name in sorted(names)]


def returned(method: object) -> type:
    """The class that a method is annotated to return: results are known by what returns them, not by their module."""
    return get_type_hints(method)["return"]


def test_the_names_of_the_package_are_these():
    assert sorted(kvsieve.__all__) == NAMES.split()
    assert all(hasattr(kvsieve, name) for name in kvsieve.__all__)


def test_functions_take_these_parameters():
    functions = [name for name in kvsieve.__all__ if inspect.isfunction(getattr(kvsieve, name))]
    assert members(kvsieve, functions) == lines(FUNCTIONS)
    functions = [name for name in kvsieve.models.__all__ if inspect.isfunction(getattr(kvsieve.models, name))]
    assert members(kvsieve.models, functions) == lines(MODELS)


def test_a_sieve_has_these_methods():
    assert members(kvsieve.Sieve) == lines(SIEVE)


def test_a_chat_has_these_methods_and_properties():
    assert members(returned(kvsieve.Sieve.chat)) == lines(CHAT)


def test_results_have_these_fields():
    sieve = kvsieve.Sieve
    results = [returned(sieve.generate), returned(sieve.load), returned(returned(sieve.chat).ask)]
    results.append(get_type_hints(results[0])["stats"])
    found = {made.__name__: [each.name for each in dataclasses.fields(made)] for made in results}
    assert found == {name: names.split() for name, names in FIELDS.items()}

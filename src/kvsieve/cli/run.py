"""`kvsieve run`: answers to prompts under one or more methods, and their costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsieve.cli.answers import Generation, check_lengths, encode, run_batches, run_methods
from kvsieve.cli.drafts import DraftOption, parse_draft
from kvsieve.cli.joined import DocumentsOption, JoinOption, given_documents, parse_join
from kvsieve.cli.kept import check_kept, found_json, print_found, print_map
from kvsieve.cli.loading import (
    DecodeOption,
    DeviceOption,
    DtypeOption,
    WeightsOption,
    check_device,
    check_least,
    check_loading,
    check_model_name,
    load_model,
    refuse_text,
)
from kvsieve.cli.memory import Limit, MemoryOption, Settings, check_memory
from kvsieve.cli.options import (
    GENERATION,
    METHOD,
    OUTPUT,
    PROMPT,
    ChunkOption,
    MaxNewTokensOption,
    ModelArgument,
    ProfileOption,
    ProtectOption,
    SeedOption,
    SettingsOption,
    SystemOption,
    TemperatureOption,
    expanded,
    option,
    refuse_option,
)
from kvsieve.cli.output import JsonOption, WideOption, emit_json, saved
from kvsieve.cli.prompts import TextPrompt, given_prompts
from kvsieve.cli.run_tables import print_answers, print_stats
from kvsieve.cli.specs import (
    BudgetOption,
    CodecsOption,
    MethodRun,
    PrefillsOption,
    RestsOption,
    chosen_spec,
    compared_specs,
    make_runs,
    parse_parts,
)
from kvsieve.cli.store import StoreOption, check_store, check_stored_plans
from kvsieve.errors import InputError
from kvsieve.planning.grammars import Grammar, library


def run_command(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[str | None, option(PROMPT, "Prompt text (default: none)")] = None,
    prompt_file: Annotated[str | None, option(PROMPT, "Prompt file; - is stdin (default: none)")] = None,
    prompts_file: Annotated[
        str | None,
        option(PROMPT, 'File with one prompt per line, as text or JSON {"prompt": "..."}; - is stdin (default: none)'),
    ] = None,
    documents: DocumentsOption = None,
    join: JoinOption = None,
    question: Annotated[str | None, option(PROMPT, "Question, appended after a blank line (default: none)")] = None,
    system: SystemOption = None,
    parse_special: Annotated[
        bool, option(PROMPT, "Treat <|im_end|> and the like in the prompt as control tokens", "--parse-special")
    ] = False,
    method: Annotated[
        str | None,
        option(
            METHOD, "Method of `kvsieve methods`, such as snapkv:kernel=21 (default: fastkv, with --documents snapkv)"
        ),
    ] = None,
    compare: Annotated[
        str, option(METHOD, "Methods to run first and compare with: full,snapkv:kernel=21 (default: none)")
    ] = "",
    budget: BudgetOption = None,
    settings: SettingsOption = None,
    profile: ProfileOption = None,
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    protect: ProtectOption = None,
    max_new_tokens: MaxNewTokensOption = 64,
    temperature: TemperatureOption = None,
    top_p: Annotated[
        float | None, option(GENERATION, "Nucleus sampling: total probability of the candidates (default 1)")
    ] = None,
    top_k: Annotated[
        int | None, option(GENERATION, "Top-k sampling: number of candidates (default: all tokens)")
    ] = None,
    seed: SeedOption = None,
    json_schema: Annotated[
        Path | None,
        option(
            GENERATION, "JSON schema that answers match, in a file (default: none)", metavar="FILE", callback=expanded
        ),
    ] = None,
    chunk: ChunkOption = 1024,
    batch: Annotated[int, option(GENERATION, "Batch size for --prompts-file")] = 8,
    draft: DraftOption = None,
    decode: DecodeOption = "auto",
    store: StoreOption = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    show_kept: Annotated[
        str | None,
        option(
            OUTPUT,
            "Page with the tokens that --method kept; - prints them (default: none)",
            "--show",
            metavar="FILE.html|-",
        ),
    ] = None,
    find: Annotated[
        list[str] | None,
        option(OUTPUT, "Text of the prompt: print which layers keep it; repeatable (default: none)", metavar="TEXT"),
    ] = None,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt under one method, or compare several.

    Compared methods share one prefill of the prompt.
    With --prompts-file the answers are JSON lines on stdout, one per prompt and method.
    """
    # Words, files and numbers are checked before torch is imported, plans before the model is loaded.
    refuse_text(model, "--prompt-file")
    check_loading(dtype, device, decode)
    check_least(1, max_new_tokens=max_new_tokens, chunk=chunk, batch=batch)
    check_memory(memory, store)
    sampling = parse_sampling(temperature, top_p, top_k, seed)
    if method is None:  # joins refuse propagators
        method = "snapkv" if documents else "fastkv"
    specs = [*compared_specs(compare, budget, profile), chosen_spec(method, budget, settings or [], profile)]
    parts = parse_parts(codec, rest, prefill)
    contents = given_documents(documents, question, {"--protect": protect, "--memory": memory})
    prompts = given_prompts(prompt, prompt_file, prompts_file, question, system, contents)
    kind = parse_join(join, prompts[0].documents)
    grammar = None if json_schema is None else read_schema(json_schema)
    roles, spans = parse_protect(protect or [], all(part.system for part in prompts))
    texts = check_kept(show_kept, find, prompts_file, as_json)
    check_store(store, protect)
    _check_batch(context, prompts_file, store)
    check_model_name(model, weights)
    drafts = parse_draft(draft, memory)
    runs = make_runs(specs, *parts)
    check_stored_plans(store, (run.plan for run in runs))
    check_device(device)
    if memory is not None:
        fitted = _within(context, runs, prompts, parse_special)
        runs = fitted.runs
        chunk = fitted.chunk
        batch = fitted.rows
        decode = fitted.decode
    loaded, tokenizer = load_model(model, dtype, device, weights)
    asked = [encode(tokenizer, part, roles, spans, parse_special, kind) for part in prompts]
    how = Generation(
        *(chunk, max_new_tokens, decode, sampling, seed),
        kept=show_kept is not None or bool(texts),
        store=store,
        # The shared prefill would take memory besides each method's own cache.
        share=len(runs) > 1 and memory is None and not documents,
        draft=drafts,
        grammar=grammar,
    )
    if prompts_file is not None:
        check_lengths(loaded, asked)
        for result in run_batches(loaded, tokenizer, asked, runs, batch, how):
            extra = prompts[result["index"]].extra
            row = {**result, "stats": result["stats"].to_dict(), **({"extra": extra} if extra else {})}
            print(json.dumps(row, default=str), flush=True)
        return
    results = run_methods(loaded, tokenizer, asked[0], runs, how)
    kept = [result.pop("kept", None) for result in results]
    written = True
    if show_kept is not None and show_kept != "-":
        written = saved("--show", show_kept, kept[-1].to_html(texts[0] if texts else ""))
    if as_json:
        for result, tokens in zip(results, kept, strict=True):
            result |= found_json(tokens, texts)
        emit_json(report(model, results))
    else:
        _print(results, kept, texts, wide, mapped=show_kept == "-")
    if not written:
        raise typer.Exit(1)


def _print(results: list[dict[str, Any]], kept: list[Any], texts: list[str], wide: bool, *, mapped: bool) -> None:
    print_answers(results, "label")
    print_stats(results, "label", wide=wide)
    print_found([result["label"] for result in results], kept, texts)
    if mapped:
        print_map(kept[-1])


def _check_batch(context: typer.Context, prompts_file: str | None, store: str | None) -> None:
    """Raise InputError for a --batch where prompts are not answered together."""
    if prompts_file is None:
        refuse_option(context, "batch", "only with --prompts-file")
    if store is not None:
        refuse_option(context, "batch", "not with --store, under which prompts are prefilled one by one")


def _within(context: typer.Context, runs: list[MethodRun], prompts: list[TextPrompt], parse_special: bool) -> Settings:
    """Return settings that keep the prompts below --memory. Raises InputError."""
    limit = Limit(context, runs)
    asked = (encode(limit.tokenizer, prompt, parse_special=parse_special) for prompt in prompts)
    longest = max(prompt.ids.shape[1] for prompt in asked)
    return limit.choose(longest + context.params["max_new_tokens"], rows=len(prompts))


def parse_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> dict[str, Any]:
    """Return options of generate: greedy unless an option of sampling is given. Raises InputError."""
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise InputError(f"--temperature must be 0 (greedy) or a positive number, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top-p must be a share above 0 and at most 1, got {top_p:g}")
    if top_k is not None and top_k < 1:
        raise InputError(f"--top-k must be at least 1, got {top_k}")
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"--seed must be a whole number from 0 to 2**63 - 1, got {seed}")
    samples = temperature != 0 and any(value is not None for value in (temperature, top_p, top_k))
    if samples:
        # Without 0 and 1 generate would use the model's configuration.
        return {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0, "top_k": top_k or 0}
    for name, value in (("--top-p", top_p), ("--top-k", top_k), ("--seed", seed)):
        if value is not None:
            raise InputError(f"{name} is for sampling, and answers are greedy here; add --temperature 1, or leave it")
    return {"do_sample": False}


def read_schema(path: Path) -> Grammar:
    """Return the grammar of a JSON schema's file. Raises InputError, also without the package that compiles it."""
    library()
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"--json-schema {path} cannot be read as JSON: {error}; give a file with one schema"
        ) from error
    return Grammar.json_schema(schema)


def parse_protect(given: list[str], system: bool) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the roles and token spans named by --protect. Raises InputError."""
    roles: list[str] = []
    spans: list[tuple[int, int]] = []
    for text in given:
        start, colon, end = text.partition(":")
        if colon and start.strip().isdecimal() and end.strip().isdecimal() and int(start) < int(end):
            spans.append((int(start), int(end)))
        elif text in ("system", "user"):
            roles.append(text)
        else:
            raise InputError(f"--protect is system, user or a span of tokens such as 0:40, got {text!r}")
    if "system" in roles and not system:
        raise InputError("--protect system needs a system prompt: give one with --system")
    return roles, spans


def report(model: str | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.report.environment import environment

    plain = [{**result, "stats": result["stats"].to_dict()} for result in results]
    return {"model": model or MODEL_NAME, "results": plain, "environment": environment()}

"""`kvsieve chat`: a conversation in the terminal, or one turn per line of stdin."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from kvsieve.cli.drafts import DraftOption, parse_draft
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
from kvsieve.cli.memory import Limit, MemoryOption, check_memory
from kvsieve.cli.options import (
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
    option,
)
from kvsieve.cli.output import WideOption, check_writable
from kvsieve.cli.prompts import check_system, read_prompt
from kvsieve.cli.run import parse_protect, parse_sampling
from kvsieve.cli.specs import (
    BudgetOption,
    CodecOption,
    MethodRun,
    PrefillOption,
    RestOption,
    chosen_spec,
    make_runs,
    parse_parts,
)
from kvsieve.cli.store import StoreOption, check_store, check_stored_plans, opened_store
from kvsieve.cli.talk import Talk, is_interactive
from kvsieve.errors import InputError
from kvsieve.hf.persist.cache_file import is_ours
from kvsieve.planning.plans import Plan

# Tokens reserved for a message, besides the longest answer.
_QUESTION = 64


def chat_command(
    command: typer.Context,
    model: ModelArgument = None,
    system: SystemOption = None,
    file: Annotated[str | None, option(PROMPT, "Text file to put before the first message (default: none)")] = None,
    load: Annotated[str | None, option(PROMPT, "Saved chat to continue (default: none)")] = None,
    commands: Annotated[bool, option(PROMPT, "Treat piped lines that start with / as commands", "--commands")] = False,
    method: Annotated[
        str | None, option(METHOD, "Method, such as snapkv or snapkv:kernel=21 (default: full, or that of --load)")
    ] = None,
    budget: BudgetOption = None,
    settings: SettingsOption = None,
    profile: ProfileOption = None,
    codec: CodecOption = None,
    rest: RestOption = None,
    prefill: PrefillOption = None,
    protect: ProtectOption = None,
    max_new_tokens: MaxNewTokensOption = 512,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    chunk: ChunkOption = 1024,
    draft: DraftOption = None,
    decode: DecodeOption = "auto",
    store: StoreOption = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    save: Annotated[str | None, option(OUTPUT, "File to save the chat to after each turn (default: none)")] = None,
    force: Annotated[
        bool, option(OUTPUT, "Let --save and /save replace a file that is no saved chat", "--force")
    ] = False,
    wide: WideOption = False,
    as_json: Annotated[bool, option(OUTPUT, "One line of JSON per turn, and nothing else", "--json")] = False,
) -> None:
    """Chat with a model: in the terminal, or one message per line of stdin."""
    # Everything possible is checked before torch is imported.
    refuse_text(model, "--file")
    check_loading(dtype, device, decode)
    check_least(1, max_new_tokens=max_new_tokens, chunk=chunk)
    check_memory(memory, store)
    sampling = parse_sampling(temperature, None, None, seed)
    check_system(system)
    load, save = (None if name is None else os.path.expanduser(name) for name in (load, save))
    if load is not None:
        _check_load(load, system, method, (budget, settings, profile, codec, rest, prefill))
    chosen = chosen_spec(method or "full", budget, settings or [], profile)
    parts = dict(zip(("--codec", "--rest", "--prefill"), parse_parts(codec, rest, prefill), strict=True))
    if several := [name for name, listed in parts.items() if len(listed) > 1]:
        raise InputError(f"a chat has one of each, got {several[0]} with a list; name one of them")
    if file == "-":
        raise InputError("--file - would read the messages' own stdin; write the text to a file")
    context = None if file is None else read_prompt(file, None)
    roles, spans = parse_protect(protect or [], system is not None or load is not None)
    check_store(store, protect)
    _check_target(save, force)
    check_model_name(model, weights)
    drafts = parse_draft(draft, memory)
    runs = make_runs([chosen], *parts.values())
    if load is not None:
        saved = _saved_plan(load)
        if method is not None and saved.name != runs[0].plan.name:
            names = f"under {saved.name}, not {runs[0].plan.name}"
            raise InputError(f"the chat in {load!r} was made {names}; leave --method out")
        runs = [MethodRun(saved.name, {}, saved)] if method is None else runs
    check_stored_plans(store, [runs[0].plan])
    check_device(device)
    longest = None
    if memory is not None:
        fitted = Limit(command, runs, codecs=load is None).choose(None, least=max_new_tokens + _QUESTION)
        runs = fitted.runs
        chunk = fitted.chunk
        decode = fitted.decode
        longest = fitted.tokens
    plan = runs[0].plan
    loaded, tokenizer = load_model(model, dtype, device, weights)

    import torch

    from kvsieve.hf.attach import attach
    from kvsieve.models.fetch import MODEL_NAME

    if seed is not None:
        torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "chunk": chunk, "max_context": longest, **sampling}
    options |= {"protect": [*roles, *spans]} if protect else {}
    options |= {"draft": drafts or "none", "retry": commands or is_interactive(as_json)}
    with opened_store(store) as prompts, attach(loaded, plan, decode=decode, tokenizer=tokenizer) as sieve:
        chat = sieve.chat(tokenizer, system, load=load, store=prompts, **options)
        talk = Talk(chat, context, save, force, commands, as_json, wide)
        if talk.interactive:
            where = f"{str(loaded.dtype).removeprefix('torch.')}, {loaded.device}"
            after = "" if load is None else f", after {len(chat.turns)} turn{'s' * (len(chat.turns) != 1)}"
            talk.aside(f"{model or MODEL_NAME} ({where}), {plan.name}{after}; /help lists the commands, Ctrl-D ends")
        talk.run()


def _check_load(path: str, system: str | None, method: str | None, given: tuple[object, ...]) -> None:
    """Raise InputError for a --load that is no saved chat, or an option that the saved chat determines."""
    if system is not None:
        raise InputError("--load brings the chat's own system prompt; leave --system out")
    if method is None and any(given):
        raise InputError(
            "--load brings the chat's own method; leave --budget, --set, --profile, --codec, --rest and --prefill out"
        )
    if not os.path.exists(path):
        raise InputError(f"--load {path!r}: No such file; name one that --save or /save wrote")
    if not is_ours(path):
        raise InputError(f"--load {path!r} is no chat that kvsieve saved; name a file that --save or /save wrote")


def _saved_plan(path: str) -> Plan:
    """Return the plan of a saved chat. Raises CacheFileError, and InputError for a cache without a chat."""
    from kvsieve.hf.persist.saved import read_header

    header = read_header(path)
    if "chat" not in header["extra"]:
        raise InputError(f"{path!r} holds a cache but no chat; name a file that --save or /save wrote")
    return Plan.from_dict(header["plan"])


def _check_target(path: str | None, force: bool) -> None:
    check_writable("--save", path)
    if path is not None and not force and not is_ours(path):
        raise InputError(
            f"--save {path!r} is there already and is no chat that kvsieve saved; name another file, or add --force to "
            "replace it"
        )

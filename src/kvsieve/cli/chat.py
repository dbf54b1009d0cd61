"""`kvsieve chat`: a conversation in the terminal, or one turn per line of stdin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvsieve.cli.loading import DecodeOption, DeviceOption, DtypeOption, check_device, check_loading, load_model
from kvsieve.cli.prompts import read_prompt
from kvsieve.cli.specs import (
    BudgetOption,
    CodecOption,
    PrefillOption,
    RestOption,
    chosen_method,
    parse_codecs,
    parse_prefills,
    parse_rests,
    with_codecs,
)
from kvsieve.cli.store import StoreOption, opened_store
from kvsieve.cli.talk import Talk
from kvsieve.errors import InputError
from kvsieve.plans import Plan


def chat_command(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory of a checkpoint or .gguf file; the demo model if left out.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="snapkv, or snapkv:kernel=21; see `kvsieve methods`. full, or what --load was made with, if left out."
        ),
    ] = None,
    budget: BudgetOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Parameters that `kvsieve calibrate` found: a file, or a shipped profile's name.")
    ] = None,
    codec: CodecOption = None,
    rest: RestOption = None,
    prefill: PrefillOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    file: Annotated[str | None, typer.Option(help="File whose text comes before the first message.")] = None,
    load: Annotated[str | None, typer.Option(help="Go on with a chat that was saved.")] = None,
    save: Annotated[str | None, typer.Option(help="Write the chat to this file after each turn.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save and /save replace a file that kvsieve did not save.")
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Lines of piped text that begin with / are commands, not messages.")
    ] = False,
    store: StoreOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.")] = 1024,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    decode: DecodeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per turn, and nothing else.")] = False,
) -> None:
    """Talk with a model: in a terminal, or with one message per line of stdin."""
    # Everything that can be wrong with the input is looked at before the model is loaded, which takes a while.
    check_loading(dtype, decode)
    for option, value in (("--max-new-tokens", max_new_tokens), ("--chunk", chunk)):
        if value < 1:
            raise InputError(f"{option} must be at least 1, got {value}")
    if system is not None and not system.strip():
        raise InputError("--system is empty; leave it out, or write a system prompt")
    if system is not None and load is not None:
        raise InputError("--load brings the chat's own system prompt; leave --system out")
    load, save = (None if name is None else os.path.expanduser(name) for name in (load, save))
    if load is not None and method is None and (budget or settings or profile or codec or rest or prefill):
        raise InputError(
            "--load brings the chat's own method; leave --budget, --set, --profile, --codec, --rest and --prefill out"
        )
    chosen = chosen_method(method or "full", budget, settings or [], profile)
    runs = with_codecs([chosen], parse_codecs(codec), parse_rests(rest), parse_prefills(prefill))
    if len(runs) > 1:
        several = f"--rest {rest}" if len(parse_rests(rest)) > 1 else f"--prefill {prefill}"
        several = f"--codec {codec}" if len(parse_codecs(codec)) > 1 else several
        raise InputError(f"a chat has one of each, got {several}; name one of them")
    plan = runs[0].plan
    if load is not None:
        saved = _saved_plan(load)
        if method is not None and saved.name != plan.name:
            raise InputError(f"the chat in {load!r} was made under {saved.name}, not {plan.name}; leave --method out")
        plan = saved if method is None else plan
    if file == "-":
        raise InputError("--file - would read the messages' own stdin; write the text to a file")
    context = None if file is None else read_prompt(file, None)
    if save is not None:
        _check_target(save, force)
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)

    import kvsieve
    from kvsieve.models.fetch import MODEL_NAME

    attached = kvsieve.attach(loaded, plan, decode=decode, tokenizer=tokenizer)
    with opened_store(store) as prompts, attached as sieve:
        chat = sieve.chat(tokenizer, system, load=load, store=prompts, max_new_tokens=max_new_tokens, chunk=chunk)
        talk = Talk(chat, context, save, force, commands, as_json)
        if talk.interactive:
            where = f"{str(loaded.dtype).removeprefix('torch.')}, {loaded.device}"
            turns = f"{len(chat.turns)} turn{'s' * (len(chat.turns) != 1)}"
            after = "" if load is None else f", after {turns}"
            talk.aside(f"{model or MODEL_NAME} ({where}), {plan.name}{after}; /help lists the commands, Ctrl-D ends")
        talk.run()


def _saved_plan(path: str) -> Plan:
    """The plan that a saved chat was made under. Raises CacheFileError, and InputError for a cache without a chat."""
    from kvsieve.hf.persist.saved import read_header

    header = read_header(path)
    if "chat" not in header["extra"]:
        raise InputError(f"{path!r} holds a cache but no chat; name a file that --save or /save wrote")
    return Plan.from_dict(header["plan"])


def _check_target(path: str, force: bool) -> None:
    """Raises InputError for a file that cannot be written, or that is not to be replaced."""
    target = Path(path).absolute()
    if target.is_dir():
        raise InputError(f"--save {path!r} is a directory; name a file")
    if not target.parent.is_dir():
        raise InputError(f"cannot write --save {path!r}: there is no directory {str(target.parent)!r}")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write --save {path!r}: no permission to write in {str(target.parent)!r}")
    from kvsieve.hf.persist.cache_file import is_ours

    if not force and not is_ours(path):
        raise InputError(
            f"--save {path!r} is there already and is no chat that kvsieve saved; name another file, or add --force to "
            "replace it"
        )

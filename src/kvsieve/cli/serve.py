"""`kvsieve serve`: a model behind OpenAI's protocol, on this machine."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from kvsieve.cli.loading import DecodeOption, DeviceOption, DtypeOption, check_device, check_loading, load_model
from kvsieve.cli.output import say
from kvsieve.cli.specs import BudgetOption, CodecOption, chosen_method, method_specs, parse_codecs, spec, with_codecs
from kvsieve.errors import InputError

_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "greenlet")


def serve_command(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory of a checkpoint or .gguf file; the demo model if left out.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="Of requests that name none, such as snapkv:kernel=21; see `kvsieve methods`.")
    ] = "full",
    budget: BudgetOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
    ] = None,
    codec: CodecOption = None,
    allow: Annotated[
        str, typer.Option(help="Methods that requests may name besides, with a comma between them.")
    ] = "full,rocketkv-mt",
    allow_codecs: Annotated[bool, typer.Option("--allow-codecs", help="Let requests name a codec.")] = False,
    name: Annotated[str | None, typer.Option(help="The model's name in requests.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for a free one.")] = 8000,
    open_: Annotated[
        bool, typer.Option("--open", help="Serve other machines without API keys, at a --host that they reach.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name that a proxy calls this server by (Host header); repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages that may ask (CORS), such as https://example.org; repeatable."),
    ] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="File with API keys, one a line; those of KVSIEVE_API_KEYS hold as well.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Directory that keeps what was read across restarts.")] = None,
    store_memory: Annotated[str, typer.Option(help="Memory for what was read; 0 for no store.")] = "2GiB",
    store_disk: Annotated[str, typer.Option(help="Most bytes of the directory.")] = "20GiB",
    share: Annotated[bool, typer.Option("--share", help="Let all API keys find what was read for any.")] = False,
    running: Annotated[int, typer.Option(help="Answers generated at once.")] = 16,
    queue: Annotated[int, typer.Option(help="Requests that wait; more are refused.")] = 64,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per pass.")] = 128,
    gap: Annotated[
        float, typer.Option(help="Longest gap between tokens while prompts are read, in gaps without.")
    ] = 2.25,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for running conversations; half of what is free if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 4096,
    seconds: Annotated[float, typer.Option(help="Longest time from a request to its end.")] = 600.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    decode: DecodeOption = "auto",
) -> None:
    """Serve a model: OpenAI's protocol, requests decoded together, prompts found again; a page at /."""
    missing = [each for each in _NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        raise InputError(f"`kvsieve serve` needs {', '.join(missing)}: run `pip install 'kvsieve[serve]'`")
    check_loading(dtype, decode)
    for option, value in (("--running", running), ("--queue", queue), ("--chunk", chunk), ("--max-tokens", max_tokens)):
        if value < 1:
            raise InputError(f"{option} must be at least 1, got {value}")
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port must be from 0 to 65535, got {port}")
    if seconds <= 0:
        raise InputError(f"--seconds must be more than 0, got {seconds}")
    if not gap > 1:
        raise InputError(f"--gap must be more than 1, got {gap}: prompts are read in what it leaves beside 1")
    runs = with_codecs([chosen_method(method, budget, settings or [])], parse_codecs(codec))
    if len(runs) > 1:
        raise InputError(f"a server has one codec, got --codec {codec}; name one of them")
    given = {key: value for key, value in runs[0].given.items() if key not in ("budget", "codec")}

    from kvsieve.budget import parse_bytes
    from kvsieve.serve.keys import read_keys
    from kvsieve.serve.limits import ServerLimits
    from kvsieve.serve.run import ServerOptions, check_reach, serve

    limits = ServerLimits(
        running,
        queue,
        seconds,
        max_tokens,
        chunk=chunk,
        gap=gap,
        kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
    )
    options = ServerOptions(
        plan=runs[0].plan,
        method=spec(runs[0].name, given),
        budget=runs[0].given.get("budget"),
        others=tuple(spec(*each) for each in method_specs(allow)) if allow else (),
        codecs=allow_codecs,
        limits=limits,
        keys=read_keys(api_keys),
        store=store,
        store_memory=store_memory,
        store_disk=store_disk,
        share=share,
        host=host,
        port=port,
        open=open_,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        name=name,
        decode=decode,
        log_prompts=log_prompts,
    )
    check_reach(options)
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)
    from kvsieve.models.fetch import MODEL_NAME

    serve(loaded, tokenizer, options, model or MODEL_NAME, say)

"""`kvsieve serve`: a server for OpenAI's and Anthropic's clients on this machine."""

from __future__ import annotations

import importlib.util
from typing import Annotated

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
    load_processor,
)
from kvsieve.cli.memory import Limit, MemoryOption, check_memory
from kvsieve.cli.options import (
    CACHE,
    GENERATION,
    LIMITS,
    MEMORY,
    METHOD,
    MODEL,
    SERVER,
    TOKENS,
    ChunkOption,
    ModelArgument,
    SettingsOption,
    option,
    refuse_option,
)
from kvsieve.cli.output import say
from kvsieve.cli.specs import BudgetOption, CodecOption, chosen_spec, make_runs, method_specs, parse_codecs, spec
from kvsieve.cli.store import check_store, check_stored_plans
from kvsieve.errors import InputError
from kvsieve.planning.quantities import parse_bytes
from kvsieve.serve.keys import check_reach, read_keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.tls import read_pair

_NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "greenlet")


def serve_command(
    context: typer.Context,
    model: ModelArgument = None,
    name: Annotated[str | None, option(MODEL, "Model name in requests (default: that of MODEL)")] = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    decode: DecodeOption = "auto",
    chunk: ChunkOption = 128,
    gap: Annotated[
        float,
        option(GENERATION, "While another prompt is prefilled, allow at most this many times the usual time per token"),
    ] = 2.25,
    draft: DraftOption = None,
    method: Annotated[str, option(METHOD, "Default method for requests that do not set kv.method")] = "full",
    budget: BudgetOption = None,
    settings: SettingsOption = None,
    codec: CodecOption = None,
    allow: Annotated[str, option(METHOD, "Other methods that requests may name: full,snapkv")] = "full,rocketkv-mt",
    allow_codecs: Annotated[bool, option(METHOD, "Let requests choose a codec", "--allow-codecs")] = False,
    host: Annotated[str, option(SERVER, "Address to listen on")] = "127.0.0.1",
    port: Annotated[int, option(SERVER, "Port to listen on; 0 picks a free one")] = 8000,
    open_: Annotated[bool, option(SERVER, "Serve other machines (--host) without API keys", "--open")] = False,
    allow_host: Annotated[
        list[str] | None,
        option(SERVER, "Host name used by a proxy (Host header); repeatable (default: none)", metavar="NAME"),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option(
            SERVER,
            "Origin of web pages allowed by CORS: https://example.org; repeatable (default: none)",
            metavar="ORIGIN",
        ),
    ] = None,
    api_keys: Annotated[
        str | None, option(SERVER, "File with one API key per line, added to KVSIEVE_API_KEYS (default: none)")
    ] = None,
    tls_cert: Annotated[
        str | None, option(SERVER, "PEM file with the certificate and its chain, for HTTPS (default: plain HTTP)")
    ] = None,
    tls_key: Annotated[
        str | None, option(SERVER, "PEM file with the certificate's private key (default: plain HTTP)")
    ] = None,
    log_prompts: Annotated[bool, option(SERVER, "Log prompts", "--log-prompts")] = False,
    store: Annotated[
        str | None, option(CACHE, "Prefix-cache directory, reused after restarts (default: memory only)")
    ] = None,
    store_memory: Annotated[str, option(CACHE, "Memory for the prefix cache; 0 disables it")] = "2GiB",
    store_disk: Annotated[str, option(CACHE, "Largest size of the directory")] = "20GiB",
    share: Annotated[bool, option(CACHE, "Share cached prefixes between API keys", "--share")] = False,
    edits: Annotated[
        str, option(CACHE, "Edits of cached sessions for prompts that change earlier messages: on or off")
    ] = "off",
    running: Annotated[int, option(LIMITS, "Requests decoded at once")] = 16,
    queue: Annotated[int, option(LIMITS, "Requests that may wait; more are refused")] = 64,
    kv_memory: Annotated[
        int | None,
        option(LIMITS, "Memory for the KV cache of running requests: 4GiB (default: half the free memory)", **MEMORY),
    ] = None,
    max_tokens: Annotated[int, option(LIMITS, "Longest answer, in tokens", **TOKENS)] = 4096,
    seconds: Annotated[float, option(LIMITS, "Longest time per request, in seconds")] = 600.0,
    drain: Annotated[
        float,
        option(LIMITS, "Seconds after SIGTERM in which the port stays open and /health answers 503"),
    ] = 0.0,
) -> None:
    """Server for OpenAI's and Anthropic's clients: continuous batching, a persistent prefix cache, a web page."""
    _check_packages()
    check_loading(dtype, device, decode)
    check_least(1, running=running, queue=queue, chunk=chunk, max_tokens=max_tokens, kv_memory=kv_memory)
    check_memory(memory)
    _check_numbers(port, seconds, gap, drain)
    _check_cache(context, edits, store, store_memory, store_disk)
    chosen = chosen_spec(method, budget, settings or [])
    codecs = parse_codecs(codec)
    if len(codecs) > 1:
        raise InputError(f"a server has one codec, got --codec {codec}; name one of them")
    others = tuple(run.label for run in make_runs(method_specs(allow)))
    check_store(store)
    keys = read_keys(api_keys)
    check_reach(keys, host, open_, allow_origin or (), allow_host or ())
    tls = read_pair(tls_cert, tls_key)
    check_model_name(model, weights)
    drafts = parse_draft(draft, memory)
    runs = make_runs([chosen], codecs)
    check_stored_plans(store, [runs[0].plan])
    _check_machine(device, host, port)
    parameters = {key: value for key, value in runs[0].given.items() if key not in ("budget", "codec")}

    from kvsieve.serve.run import ServerOptions, serve

    if memory is not None:
        fitted, store_memory = Limit(context, runs, codecs=False).choose_server()
        chunk = fitted.chunk
        decode = fitted.decode
        kv_memory = fitted.kv
    limits = ServerLimits(running, queue, seconds, max_tokens, chunk=chunk, gap=gap, kv_bytes=kv_memory)
    options = ServerOptions(
        plan=runs[0].plan,
        method=spec(runs[0].name, parameters),
        budget=runs[0].given.get("budget"),
        others=others,
        codecs=allow_codecs,
        draft=drafts,
        limits=limits,
        keys=keys,
        store=store,
        store_memory=store_memory,
        store_disk=store_disk,
        share=share,
        edits=edits == "on",
        host=host,
        port=port,
        open=open_,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        tls=tls,
        drain=drain,
        name=name,
        decode=decode,
        log_prompts=log_prompts,
    )
    processor = load_processor(model, weights)
    loaded, tokenizer = load_model(model, dtype, device, weights, images=processor is not None)
    from kvsieve.models.fetch import MODEL_NAME

    serve(loaded, tokenizer, options, model or MODEL_NAME, say, processor)


def _check_packages() -> None:
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(f"`kvsieve serve` needs {', '.join(missing)}: run `pip install 'kvsieve[serve]'`")


def _check_machine(device: str | None, host: str, port: int) -> None:
    """Raise InputError for a device or an address that cannot be used here."""
    check_device(device)

    from kvsieve.serve.run import listening_socket

    listening_socket(host, port).close()


def _check_cache(context: typer.Context, edits: str, store: str | None, memory: str, disk: str) -> None:
    """Raise InputError for sizes that are none or limit no store, and for --edits without cached sessions."""
    if store is None:
        refuse_option(context, "store_disk", "only with --store DIR, which it limits")
    for size in {memory.strip(), disk} - {"none"}:
        parse_bytes(size)
    if edits not in ("on", "off"):
        raise InputError(f"--edits is on or off, got {edits}")
    if edits == "on" and store is None and memory.strip() in ("0", "none"):
        raise InputError("--edits on edits cached sessions, and --store-memory 0 caches none; leave one of them out")


def _check_numbers(port: int, seconds: float, gap: float, drain: float) -> None:
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port must be from 0 to 65535, got {port}")
    if not seconds > 0:
        raise InputError(f"--seconds must be more than 0, got {seconds}")
    if not gap > 1:
        raise InputError(f"--gap must be more than 1, got {gap}: prompts are prefilled in the time above 1")
    if not 0 <= drain < float("inf"):
        raise InputError(f"--drain must be a number of seconds from 0, got {drain}")

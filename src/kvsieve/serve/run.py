"""Running the server: model, scheduler, store and application together, from the start to the last answer."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvsieve.errors import InputError
from kvsieve.hf.attach import attached
from kvsieve.plans import Plan
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.app import Service, create_app
from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.memory import free_bytes
from kvsieve.serve.prefixes import Prefixes, open_prefixes
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.scheduler import Scheduler

# Seconds that running answers get once the server is told to stop.
_GRACE = 20.0


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server; see `kvsieve serve --help`.

    Attributes:
        plan: of requests that ask for none.
        method: how its method is written, without its budget.
        budget: of it.
        others: methods that requests may name besides.
        codecs: let requests name a codec.
        limits: of requests.
        keys: who may ask.
        store: directory of the store; None for memory alone.
        store_memory: bytes of it in memory, such as "2GiB"; "0" for no store.
        store_disk: bytes of the directory.
        share: let all keys find what was read for any.
        host: address to listen at.
        port: port to listen at; 0 for a free one.
        name: of the model in requests; None for the name it was loaded by.
        decode: how tokens are generated; see `attach`.
        log_prompts: write prompts to the log.
    """

    plan: Plan = field(default_factory=Plan)
    method: str = "full"
    budget: str | float | None = None
    others: tuple[str, ...] = ()
    codecs: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: Keys = field(default_factory=Keys)
    store: str | None = None
    store_memory: str = "2GiB"
    store_disk: str = "20GiB"
    share: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    decode: str = "auto"
    log_prompts: bool = False


@contextlib.contextmanager
def application(model: Any, tokenizer: Any, options: ServerOptions, name: str) -> Iterator[FastAPI]:
    """Make the application with a scheduler that runs inside the block, and ends with it."""
    limits = options.limits
    if limits.kv_bytes is None:
        limits = dataclasses.replace(limits, kv_bytes=free_bytes(model.device))
    with attached(model, Plan(), options.decode, tokenizer, any_plan=True) as sieve:
        scheduler = Scheduler(sieve, tokenizer, limits, _prefixes(options))
        plans = AllowedPlans(
            options.plan, options.method, options.budget, options.others, options.codecs, scheduler.check_plan
        )
        # Refused now rather than at the first request.
        scheduler.check_plan(options.plan)
        service = Service(
            scheduler=scheduler,
            preparer=Preparer(model, tokenizer, plans, limits),
            plans=plans,
            keys=options.keys,
            model=options.name or name,
            created=int(time.time()),
            hosts=_hosts(options),
            log_prompts=options.log_prompts,
        )
        scheduler.start()
        try:
            yield create_app(service)
        finally:
            scheduler.close()


def _prefixes(options: ServerOptions) -> Prefixes | None:
    return open_prefixes(options.store, options.store_memory, options.store_disk, options.share)


def _hosts(options: ServerOptions) -> tuple[str, ...]:
    """Names that a request may call this server by: a page elsewhere could else reach one that has no keys."""
    local = options.host == "localhost"
    with contextlib.suppress(ValueError):
        local = local or ipaddress.ip_address(options.host).is_loopback
    return ("localhost", "127.0.0.1", "[::1]", options.host) if local and not options.keys else ()


def serve(model: Any, tokenizer: Any, options: ServerOptions, name: str, say: Callable[[str], None]) -> None:
    """Serve until the process is told to stop; then running answers are finished and the store is written.

    Raises InputError for an address that cannot be listened at.
    """
    listening = _socket(options.host, options.port)
    with application(model, tokenizer, options, name) as app:
        service: Service = app.state.service
        host = f"[{options.host}]" if ":" in options.host else options.host
        told = "" if options.keys else "; no API keys, so whoever reaches it may ask"
        say(f"serving {service.model} under {options.plan.name} at http://{host}:{listening.getsockname()[1]}{told}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(_GRACE), lifespan="off"
        )
        uvicorn.Server(config).run(sockets=[listening])


def _socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise InputError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; name another --port"
        ) from error
    return made

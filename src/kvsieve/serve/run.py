"""Running of the server: model, scheduler, store and application, from the start to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvsieve.errors import InputError
from kvsieve.hf.attach import attached, under
from kvsieve.hf.drafts.opened import check_draft
from kvsieve.planning.drafts import Draft
from kvsieve.planning.plans import Plan
from kvsieve.serve.allowed import AllowedPlans
from kvsieve.serve.app import create_app
from kvsieve.serve.connections import bounded_connections
from kvsieve.serve.endpoint import Service
from kvsieve.serve.keys import Keys, check_reach, is_local
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.memory import check_room, free_bytes
from kvsieve.serve.prefixes import Prefixes, open_prefixes
from kvsieve.serve.prepare import Preparer
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.signals import ended_by_signals, kept_signals

# Seconds for running answers after a signal to stop.
_GRACE = 20.0
# Seconds between two looks at whether a drain is cut short.
_TICK = 0.1


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server; see `kvsieve serve --help`.

    Attributes:
        plan: default plan of requests.
        method: its method in command-line syntax, without its budget.
        budget: its budget.
        others: further methods that requests may name.
        codecs: let requests name a codec.
        draft: default source of drafts; requests may draft fewer tokens, or none. None for no drafts.
        limits: of requests.
        keys: authorized API keys.
        store: directory of the prefix cache; None for memory alone.
        store_memory: its bytes in memory, such as "2GiB"; "0" for no prefix cache.
        store_disk: its bytes on disk.
        share: share prefixes between API keys.
        edits: edit sessions that a prompt does not continue; requests may decline.
        host: address to listen at.
        port: port to listen at; 0 for a free one.
        open: serve every client that reaches the address, without a key.
        hosts: further host names of this server, for a proxy.
        origins: allowed web pages elsewhere; "*" for all.
        tls: paths of a certificate and its key (`tls.read_pair`); None for plain HTTP.
        drain: seconds after SIGTERM in which requests are still taken, and /health says that the server is closing.
        name: of the model in requests; None for the name it was loaded by.
        decode: engine of the decoding steps; see `attach`.
        log_prompts: write prompts to the log.
    """

    plan: Plan = field(default_factory=Plan)
    method: str = "full"
    budget: str | float | None = None
    others: tuple[str, ...] = ()
    codecs: bool = False
    draft: Draft | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: Keys = field(default_factory=Keys)
    store: str | None = None
    store_memory: str = "2GiB"
    store_disk: str = "20GiB"
    share: bool = False
    edits: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    open: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tls: tuple[str, str] | None = None
    drain: float = 0.0
    name: str | None = None
    decode: str = "auto"
    log_prompts: bool = False


@contextlib.contextmanager
def application(
    model: Any, tokenizer: Any, options: ServerOptions, name: str, processor: Any = None
) -> Iterator[FastAPI]:
    """Make the application with a scheduler that runs inside the block.

    processor: of a composite model; None to refuse images.
    """
    limits = options.limits
    if limits.kv_bytes is None:
        limits = dataclasses.replace(limits, kv_bytes=free_bytes(model))
    check_room(model, limits.kv_bytes)
    with attached(model, Plan(), options.decode, tokenizer, any_plan=True) as sieve:
        scheduler = Scheduler(sieve, tokenizer, limits, _prefixes(options))
        own = options.plan, options.method, options.budget
        plans = AllowedPlans(*own, options.others, options.codecs, scheduler.check_plan, options.draft, options.edits)
        # Refused now rather than at the first request.
        plan = scheduler.check_plan(options.plan)
        if options.draft is not None:
            check_draft(options.draft, under(sieve, plan))
        preparer = Preparer(model, tokenizer, plans, limits, scheduler.context, processor)
        service = Service(
            scheduler=scheduler,
            preparer=preparer,
            plans=plans,
            keys=options.keys,
            model=options.name or name,
            created=int(time.time()),
            hosts=_hosts(options),
            origins=options.origins,
            log_prompts=options.log_prompts,
        )
        scheduler.start()
        try:
            yield create_app(service)
        finally:
            scheduler.close()
            preparer.grammars.close()


def _prefixes(options: ServerOptions) -> Prefixes:
    return open_prefixes(options.store, options.store_memory, options.store_disk, options.share)


def _hosts(options: ServerOptions) -> tuple[str, ...]:
    """Return the allowed host names; otherwise web pages elsewhere could reach a server without keys."""
    guarded = options.hosts or (is_local(options.host) and not options.keys)
    host = f"[{options.host}]" if ":" in options.host else options.host
    return ("localhost", "127.0.0.1", "[::1]", host, *options.hosts) if guarded else ()


def serve(
    model: Any, tokenizer: Any, options: ServerOptions, name: str, say: Callable[[str], None], processor: Any = None
) -> None:
    """Serve until a signal stops the process; then finish running answers and write the store.

    processor: see `application`.

    Raises InputError for an address that is not available, or that others reach without a key.
    """
    check_reach(options.keys, options.host, options.open, options.origins, options.hosts)
    listening = listening_socket(options.host, options.port)
    port = listening.getsockname()[1]
    with kept_signals(), application(model, tokenizer, options, name, processor) as app, ended_by_signals(say):
        service: Service = app.state.service

        def ready() -> None:
            scheme = "https" if options.tls else "http"
            host = f"[{options.host}]" if ":" in options.host else options.host
            warning = "" if options.keys else "; no API keys: anyone who reaches it may use it"
            say(f"serving {service.model} under {options.plan.name} at {scheme}://{host}:{port}{warning}")

        certificate, key = options.tls or (None, None)
        config = uvicorn.Config(
            app,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            http=bounded_connections(2 * options.limits.requests),
            ws="none",
            log_level="warning",
            access_log=False,
            # The scheduler ends running requests; text not sent by then is lost.
            timeout_graceful_shutdown=int(_GRACE) + 10,
            lifespan="off",
        )
        leaving = service.scheduler.stop
        _Server(config, ready, lambda drain: leaving(drain + _GRACE), options.drain).run(sockets=[listening])


class _Server(uvicorn.Server):
    """uvicorn's server that reports when it listens and when a signal stops it.

    Args:
        config: uvicorn's.
        ready: called when it listens.
        leaving: called at the signal, with the seconds until the port is closed.
        drain: these seconds after SIGTERM; none after Ctrl-C.
    """

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], leaving: Callable[[float], None], drain: float
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._leaving = leaving
        self._drain = drain
        self._is_terminated = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._is_terminated = self._is_terminated or sig == signal.SIGTERM
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = self._drain if self._is_terminated else 0.0
        self._leaving(drain)
        end = time.monotonic() + drain
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(_TICK)
        await super().shutdown(sockets)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises InputError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol asyncio knows that small pieces are to be sent at once (TCP_NODELAY).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, TypeError, ValueError) as error:
        listener.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"cannot listen at {host}, port {port}: {reason}; name another --host or --port") from error
    return listener

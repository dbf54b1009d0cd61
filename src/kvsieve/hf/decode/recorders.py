"""Recorders of a decoding pass, so that it can be run again: as a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Run = Callable[[], Tensor]


class Refused(Exception):
    """A pass, or all of them, cannot be run with fixed shapes; the message has the reason."""


class Graphs:
    """Records passes as CUDA graphs. Raises Refused without CUDA.

    Each has a memory pool of its own: a pool that all its graphs have left takes no other while a library still keeps
    memory in it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise Refused(f"a CUDA graph needs the model on a CUDA device, it is on {device.type}")
        self.device = device

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            aside = _stream(torch.cuda.current_device())
            aside.wait_stream(before)
            # Libraries' initialization on first use must not be recorded.
            with torch.cuda.stream(aside):
                run()
            before.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with (
                _uncollected(),
                _restored(before),
                torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"),
            ):
                out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all recordings on a device: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: an earlier graph among it would break the recording in progress."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _restored(stream: torch.cuda.Stream) -> Iterator[None]:
    """Restore the stream and the random generator if a recording fails, which leaves both as if it went on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)
        raise


# Records a pass: runs it at least once, and returns a function that replays it.
RECORDERS: dict[str, Callable[[torch.device], Callable[[Run], Run]]] = {"graph": Graphs}

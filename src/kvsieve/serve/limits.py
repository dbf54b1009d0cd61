"""The operator's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests and of concurrency.

    Attributes:
        running: answers that are generated at once.
        queue: waiting requests.
        seconds: from a request to its end.
        max_tokens: of an answer.
        answers: to one request.
        chunk: prompt tokens per pass.
        gap: factor by which a prefill may lengthen the time between tokens of running answers; see ReadingPace.
        kv_bytes: of all running conversations; None for no limit.
        body_bytes: of a request.
        uploads: bodies of the longest kind in memory at once.
        messages: of a chat.
        stops: texts that end an answer.
        documents: of a request.
        images: of a request.
        pixels: of all images of a request together.
        image_bytes: of all requests' images together, as the model is given them.
    """

    running: int = 16
    queue: int = 64
    seconds: float = 600.0
    max_tokens: int = 4096
    answers: int = 8
    chunk: int = 128
    gap: float = 2.25
    kv_bytes: int | None = None
    body_bytes: int = 8 << 20
    uploads: int = 16
    messages: int = 1000
    stops: int = 16
    documents: int = 64
    images: int = 16
    pixels: int = 1 << 25
    image_bytes: int = 1 << 30

    @property
    def requests(self) -> int:
        """Requests at once: running, waiting, and as many in transit."""
        return self.running + self.queue + 64

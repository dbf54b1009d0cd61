"""Client of bench/peer.py: another interpreter with the same model, idle while others are measured."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvsieve.errors import KvsieveError

_SCRIPT = Path(__file__).parent / "peer.py"
_LAST_LINES = 6


class Peer:
    """A running peer; a context manager. versions: of kvpress, transformers and torch there."""

    def __init__(self, python: str, model: Any) -> None:
        """python: the interpreter, with kvpress. model: ours; it is loaded from the same place, in the same dtype.

        Raises KvsieveError, with the last lines it wrote, if it does not start.
        """
        self._python = python
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        # The other interpreter must not use our packages.
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        dtype = str(model.dtype).removeprefix("torch.")
        options = {"model": model.name_or_path, "dtype": dtype, "device": str(model.device)}
        command = [python, str(_SCRIPT), "--threads", str(torch.get_num_threads())]
        for name, value in options.items():
            command += [f"--{name}", value]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
            )
        except OSError as error:
            self._log.close()
            raise KvsieveError(f"cannot start the peer's interpreter {python!r}: {error.strerror or error}") from error
        try:
            hello = self._answer()
        except BaseException:
            self.close()
            raise
        self.versions = {f"peer_{name}": version for name, version in hello.items()}

    def run(
        self, ids: list[list[int]], new_tokens: int, method: str, kept: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Run bench.plain.read_and_decode there; return its result and the peak. Raises KvsieveError if it fails."""
        request = {"ids": ids, "new_tokens": new_tokens, "method": method, "kept": kept, "options": options}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise KvsieveError(self._died()) from None
        answer = self._answer()
        if "error" in answer:
            raise KvsieveError(f"kvpress ({self._python}) failed on {method!r}: {answer['error']}; {self._tail()}")
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvsieveError(self._died())
        return json.loads(line)

    def _died(self) -> str:
        return f"the peer's interpreter {self._python!r} ended with code {self._process.wait()}; {self._tail()}"

    def _tail(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return "it wrote: " + (" / ".join(lines[-_LAST_LINES:]) or "nothing")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

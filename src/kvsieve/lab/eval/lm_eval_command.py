"""The command ``kvsieve-lm-eval``: lm-evaluation-harness's own, with ``--model kvsieve`` registered."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the harness's command line, or exit with an installation hint if it is missing."""
    try:
        importlib.import_module("kvsieve.lab.eval.lm_eval_model")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

"""The command `kvsieve`, and ``python -m kvsieve``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            # The package has set that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        from kvsieve.cli.main import run_cli

        run_cli()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

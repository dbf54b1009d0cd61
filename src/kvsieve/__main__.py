"""The command `kvsieve`, and ``python -m kvsieve``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it without a traceback."""
    try:
        from kvsieve.cli.main import run_cli
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run_cli()


if __name__ == "__main__":
    main()

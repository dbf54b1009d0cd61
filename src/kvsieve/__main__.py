"""``python -m kvsieve``: the command line."""

from kvsieve.cli.main import run_cli

if __name__ == "__main__":
    run_cli()

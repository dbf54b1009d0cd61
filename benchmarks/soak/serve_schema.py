"""Requests that schemathesis makes of the server's OpenAPI schema, valid and broken, against every endpoint.

    python -m venv schema-env && schema-env/bin/pip install schemathesis
    python benchmarks/soak/serve_schema.py --program schema-env/bin/schemathesis [--examples 100] [--seed 0] [MORE ...]

The server is `kvsieve serve`'s, of a tiny random model, with a key, in this process. Every reply has to be one that the
schema has: its status, type, headers and body; nothing may fail with 500, and what breaks the schema is refused. That
all that fits the schema is answered is not checked: a model's context and the operator's limits are not in it. The
schema gets the model's name, as any other is refused before the rest is looked at. MORE are further options of
`schemathesis run`. Exits with its status: 0 if nothing was found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import serve_tiny

from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions

KEY = "schema-key"
HOOKS = """
import schemathesis

@schemathesis.hook
def before_load_schema(context, raw_schema):
    for name, schema in raw_schema["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            schema["properties"]["model"] = {"const": "tiny"}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--program", default="schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="at most, of an endpoint and phase")
    parser.add_argument("--seed", type=int, default=0)
    given, more = parser.parse_known_args()
    limits = ServerLimits(max_tokens=16, seconds=60, kv_bytes=1 << 30)
    options = ServerOptions(
        keys=Keys([KEY]), codecs=True, others=("snapkv:window=4", "streamingllm"), limits=limits, store_memory="16MiB"
    )
    with serve_tiny.served(options) as (url, _), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "serve_hooks.py").write_text(HOOKS)
        command = [given.program, "run", f"{url}/openapi.json", "--exclude-checks", "positive_data_acceptance"]
        command += ["--max-examples", str(given.examples), "--seed", str(given.seed), "--request-timeout", "60"]
        command += ["--header", f"Authorization: Bearer {KEY}", *more]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "serve_hooks", "PYTHONPATH": folder}
        return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

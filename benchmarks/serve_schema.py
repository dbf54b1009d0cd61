"""Responses of the server against its OpenAPI schema, by schemathesis: requests drawn from the schema, and broken ones.

    python benchmarks/serve_schema.py [--cases 200] [--seed 1] [--schemathesis schemathesis] [--out FILE]

Needs `pip install schemathesis` (its command may be of another environment). The model is tiny and random; the server
runs in this process with an API key. A first run draws valid and broken requests from the server's own schema, of
which most ask for what this model or server does not have; a second one draws from a narrower schema, whose requests
are answered. Checked are that no request makes an error of the server, that status, content type, headers and body
are those of the schema, that what the schema forbids is refused, that other methods are, and that nothing is told
without a key.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from kvsieve.report.environment import environment, write_result
from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions
from serve_tiny import served

KEY = "the-key"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose requests are answered; what it allows the server's own does, too."""
    for name in ("ChatRequest", "CompletionRequest"):
        members = schema["components"]["schemas"][name]["properties"]
        for each in ("max_tokens", "max_completion_tokens"):
            if each in members:
                members[each] = {"type": "integer", "minimum": 1, "maximum": 8}
        members["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
        for each in ("kv", "best_of", "echo", "logit_bias", "top_logprobs", "stop", "tools", "stream"):
            members.pop(each, None)
        schema["components"]["schemas"][name].setdefault("required", []).append("max_tokens")
    schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"] = {
        "type": "array",
        "items": {"type": "integer", "minimum": 3, "maximum": 120},
        "minItems": 1,
        "maxItems": 60,
    }
    schema["components"]["schemas"]["ChatRequest"]["properties"]["messages"]["items"] = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return schema


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="of each operation and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", default="schemathesis")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serve_schema.json")
    given = parser.parse_args()
    limits = ServerLimits(chunk=32, max_tokens=64, kv_bytes=1 << 28)
    options = ServerOptions(keys=Keys([KEY]), codecs=True, limits=limits, store_memory="16MiB", others=("snapkv",))
    runs = {}
    with served(options) as (url, app):
        schema = httpx.get(f"{url}/openapi.json").json()
        for name in ("ChatRequest", "CompletionRequest"):
            schema["components"]["schemas"][name]["properties"]["model"] = {"const": "tiny"}
        for mode, document in (("all", schema), ("positive", narrowed(copy.deepcopy(schema)))):
            runs[mode] = run(given, url, document, mode)
        counts = dict(app.state.service.scheduler.counts)
    report = {
        "environment": environment(),
        "cases": given.cases,
        "seed": given.seed,
        "checks": list(CHECKS),
        "runs": runs,
        "server_counts": counts,
    }
    write_result(given.out, report)
    print(json.dumps({key: report[key] for key in report if key != "environment"}, indent=1))
    if any(each["exit"] for each in runs.values()):
        raise SystemExit("some responses were not as the schema says")


def run(given: argparse.Namespace, url: str, document: dict[str, Any], mode: str) -> dict[str, Any]:
    """Statuses of the responses to requests drawn from a schema, and how schemathesis ended."""
    with tempfile.TemporaryDirectory() as folder:
        schema, events = Path(folder, "openapi.json"), Path(folder, "events.ndjson")
        schema.write_text(json.dumps(document))
        command = [given.schemathesis, "run", str(schema), "--url", url, "--header", f"Authorization:Bearer {KEY}"]
        command += ["--checks", ",".join(CHECKS), "--max-examples", str(given.cases), "--seed", str(given.seed)]
        command += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-shrink", "--mode", mode]
        command += ["--suppress-health-check", "all", "--report-ndjson-path", str(events)]
        command += ["--generation-database", "none", "--warnings", "off"]
        done = subprocess.run(command, cwd=folder, check=False)
        statuses = Counter(str(each["response"]["status_code"]) for each in interactions(events))
    return {"exit": done.returncode, "responses": statuses.total(), "statuses": dict(sorted(statuses.items()))}


def interactions(path: Path) -> list[dict[str, Any]]:
    """All requests and responses of schemathesis' report."""
    found: list[dict[str, Any]] = []

    def visit(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(part.get("response"), dict) and "status_code" in part["response"]:
                found.append(part)
                return
            for each in part.values():
                visit(each)
        elif isinstance(part, list):
            for each in part:
                visit(each)

    for line in path.read_text().splitlines():
        visit(json.loads(line))
    return found


if __name__ == "__main__":
    main()

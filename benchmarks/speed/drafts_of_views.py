"""Acceptance of drafts by the model's own views of its cache, and the times of the passes that draft and verify.

    python benchmarks/speed/drafts_of_views.py [MODEL] [--lengths 8192] [--tasks edit,quote,summary,free]
        [--views "quest:budget=5%;snapkv:budget=5%"] [--plan full] [--tokens 4] [--samples 4] [--out FILE]

The prompts are those of copying.py. A document is prefilled once; every question about it continues a fork of that
cache, once without drafts and once with each view, which drafts `--tokens` tokens for every pass, also where that does
not pay. Times are medians of passes, and ratios of them to a pass over one token of the same question. `open` is the
time of the first draft, which makes the copy of an evictor or a codec. Samples that the result has are not measured
again, so a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from benchmarks.speed.copying import QUESTIONS, TASKS, documents
from benchmarks.speed.speculation import CHUNK, plan_named, shared
from kvsieve.hf.drafts.drafter import Drafter
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.hf.forward.request import PassRequest
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

VIEWS = "quest:budget=5%;snapkv:budget=5%;snapkv:budget=10%;lagkv:budget=10%;kivi"
NONE = "none"


def timed(device: Any, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work` and its milliseconds."""
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, 1e3 * (time.perf_counter() - began)


def answer(sieve: Any, cache: Any, tokens: list[int], drafter: Drafter | None, most: int, new: int) -> dict[str, Any]:
    """Return counts and times of a greedy answer of `new` tokens.

    Args:
        sieve: the attached model.
        cache: of the prompt.
        tokens: the prompt's, and the answer's first, which is not fed.
        drafter: None for passes over one token each.
        most: tokens drafted for a pass.
        new: tokens of the answer, the first included.
    """
    device = sieve.model.device
    tokens = list(tokens)
    start = len(tokens)
    drafts: list[float] = []
    verified: list[float] = []
    drafted = accepted = 0
    fed = tokens
    while len(tokens) < start - 1 + new:
        guesses: list[int] = []
        if drafter is not None:
            drafter.extend(fed)
            guesses, spent = timed(device, lambda: drafter.propose(most))
            drafts.append(spent)
        ids = torch.tensor([[tokens[-1], *guesses]], device=device)

        def verify(ids: torch.Tensor = ids) -> Any:
            return sieve.feed(cache, ids, None, PassRequest(tentative=True), logits=ids.shape[1])

        result, spent = timed(device, verify)
        verified.append(spent)
        own = result.logits[0].argmax(-1).tolist()
        right = next((at for at, guess in enumerate(guesses) if guess != own[at]), len(guesses))
        result.transaction.accept(right + 1)
        fed = own[: right + 1]
        tokens += fed
        drafted += len(guesses)
        accepted += right
    run = {"tokens": tokens[start:], "passes": len(verified), "verify_ms": statistics.median(verified)}
    if drafter is None:
        return run | {"ms": sum(verified)}
    later = drafted / len(drafts) * (len(drafts) - 1)
    draft_ms = sum(drafts[1:]) / max(later, 1)
    counts = {"drafted": drafted, "accepted": accepted, "open_ms": drafts[0]}
    return run | counts | {"draft_ms": draft_ms, "ms": sum(verified) + sum(drafts[1:])}


class Run:
    """A run's settings, its samples so far, and the file of them. Raises SystemExit if that is of other settings."""

    def __init__(self, sieve: Any, name: str, arguments: argparse.Namespace) -> None:
        self.sieve = sieve
        self.arguments = arguments
        self.views = {view: checked_view(view, sieve) for view in arguments.views.split(";")}
        self.samples: list[dict[str, Any]] = []
        dtype = str(sieve.model.dtype).removeprefix("torch.")
        settings = {"model": name, "dtype": dtype, "device": str(sieve.model.device), "plan": arguments.plan}
        self.report: dict[str, Any] = {**settings, "drafted": arguments.tokens, "new_tokens": arguments.new_tokens}
        if arguments.out.exists():
            known = json.loads(arguments.out.read_text())
            if any(known[key] != value for key, value in self.report.items()):
                raise SystemExit(f"error: {arguments.out} has other settings; name another file with --out")
            self.samples = known["samples"]
            self.report["environments"] = known["environments"]
        self.report.setdefault("environments", []).append(environment(sieve.model))

    def document(self, tokenizer: Any, text: Any, length: int, number: int) -> None:
        """Measure what is missing of the questions about a document. number: of the document."""
        prompts = {}
        for task in set(text.questions) & set(self.arguments.tasks.split(",")):
            for at, ids in enumerate(text.prompts(tokenizer, task)):
                place = {"length": length, "task": task, "sample": number * QUESTIONS + at}
                known = [each["runs"] for each in self.samples if place.items() <= each.items()]
                done = any(runs.keys() >= self.views.keys() for runs in known)
                if place["sample"] < self.arguments.samples and not done:
                    prompts[tuple(place.values())] = ids
        if not prompts:
            return
        device = self.sieve.model.device
        size = shared(list(prompts.values()))
        first = next(iter(prompts.values()))
        begun = self.sieve.begin(torch.tensor([first[:size]], device=device), chunk=CHUNK)
        for (_, task, sample), ids in prompts.items():
            runs = self.question(begun.fork(), ids)
            place = {"length": length, "task": task, "sample": sample}
            self.samples = [each for each in self.samples if not place.items() <= each.items()]
            self.samples.append({**place, "runs": runs})
            report = {**self.report, "summary": summary(self.samples), "samples": self.samples}
            write_result(self.arguments.out, report)
            print(json.dumps(self.samples[-1]), flush=True)

    def question(self, cache: Any, ids: list[int]) -> dict[str, Any]:
        """Return the runs about one question without drafts and with each view. cache: of the prompt's beginning."""
        sieve = self.sieve
        most = self.arguments.tokens
        new = self.arguments.new_tokens
        rest = torch.tensor([ids[cache.num_seen :]], device=sieve.model.device)
        cache.turn.resume(len(ids), new, acts=True)
        logits = sieve.feed(cache, rest, None, PassRequest(phase="prefill"), logits=1).logits
        tokens = [*ids, int(logits[0, -1].argmax())]
        # Makes kernels and buffers.
        answer(sieve, cache.fork(), tokens, None, most, 4)
        runs = {NONE: answer(sieve, cache.fork(), tokens, None, most, new)}
        for view, plan in self.views.items():
            fork = cache.fork()
            runs[view] = answer(sieve, fork, tokens, view_drafter(sieve, fork, plan), most, new)
        expected = runs[NONE].pop("tokens")[: new - 1]
        for view in self.views:
            runs[view]["same"] = runs[view].pop("tokens")[: new - 1] == expected
        return {
            name: {key: round(value, 2) if type(value) is float else value for key, value in run.items()}
            for name, run in runs.items()
        }


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per length, task and view; "all" for all tasks."""
    by: dict[tuple[int, str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for sample in samples:
        for view, run in sample["runs"].items():
            for task in (sample["task"], "all") if view != NONE else ():
                by.setdefault((sample["length"], task, view), []).append((sample["runs"][NONE], run))
    return [dict(zip(("length", "task", "view"), place, strict=True)) | _summed(by[place]) for place in sorted(by)]


def _summed(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    total = {key: sum(run[key] for _, run in pairs) for key in ("passes", "drafted", "accepted", "same")}

    def median(of: Callable[[dict[str, Any], dict[str, Any]], float]) -> float:
        return round(statistics.median(of(base, run) for base, run in pairs), 2)

    def speed(base: dict[str, Any], run: dict[str, Any]) -> float:
        """Return tokens per time, in that without drafts."""
        own = (run["passes"] + run["accepted"]) / run["ms"]
        return float(own * base["ms"] / base["passes"])

    return {
        "samples": len(pairs),
        "accepted": round(total["accepted"] / max(total["drafted"], 1), 3),
        "tokens_per_pass": round(1 + total["accepted"] / total["passes"], 2),
        "token_ms": median(lambda base, run: base["verify_ms"]),
        "draft": median(lambda base, run: run["draft_ms"] / base["verify_ms"]),
        "verify": median(lambda base, run: run["verify_ms"] / base["verify_ms"]),
        "open": median(lambda base, run: run["open_ms"] / base["verify_ms"]),
        "speed": median(speed),
        "same": total["same"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a directory or hub id (default: the demo model)")
    parser.add_argument("--lengths", default="8192", help="tokens of prompt and answer (default: 8192)")
    parser.add_argument("--tasks", default="edit,quote,summary,free")
    parser.add_argument("--views", default=VIEWS, help="plans, separated by semicolons")
    parser.add_argument("--plan", default="full", help="of the verified cache (default: full)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens drafted for a pass (default: 4)")
    parser.add_argument("--samples", type=int, default=4, help="of each task and length (default: 4)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer (default: 64)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "drafts_of_views.json")
    arguments = parser.parse_args()
    model, tokenizer = kvsieve.models.load(arguments.model)
    name = Path(arguments.model).name if arguments.model else "demo"
    count = -(-arguments.samples // QUESTIONS)
    with kvsieve.attach(model, plan_named(arguments.plan), tokenizer=tokenizer) as sieve, torch.no_grad():
        run = Run(sieve, name, arguments)
        for length in map(int, arguments.lengths.split(",")):
            for kind, tasks in TASKS.items():
                if set(tasks) & set(arguments.tasks.split(",")):
                    for number, text in enumerate(documents(kind, tokenizer, length - arguments.new_tokens, count)):
                        run.document(tokenizer, text, length, number)
    rows = summary(run.samples)
    print(markdown_table([*rows[0]], [list(map(str, row.values())) for row in rows]))


if __name__ == "__main__":
    main()

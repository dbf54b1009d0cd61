"""Edited caches beside reading anew: an agent's turns with stripped reasoning and cleared tool results.

    python benchmarks/answers/edits.py [MODEL] [--plans "full;snapkv:budget=25%"] [--windows 0,32,64,256,all]
        [--traces 1] [--turns 30] [--kept 8] [--every 1] [--answer 24] [--minutes M] [--out FILE]

The conversations are those of agent_traces.py. For each window a cache goes through all turns of a trace: it becomes
the next prompt's known part (`sieve.edit(cache, ids).become`), the new message is prefilled, and the trace's answer
with its reasoning is fed. In every turn (or every n-th, --every) the same prompt is prefilled anew, too, under the same
plan, in turns with the windows. Anew answers greedily. At each token of that answer the edited cache's
distributions are compared: divergence (KL), and whether its greedy answer is the same. Times to the first token include
the edit. A window of "all" prefills everything from the first change on: exact, and what a prefix cache does. Under
plans that evict it differs from anew, too, since each turn's prompt has chosen what to keep.

Rows are those of turns; summaries have medians of ratios within a turn. A trace that was interrupted begins again;
complete ones are not run again. Results go to benchmarks/results/edits.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvsieve
from benchmarks.answers.agent_traces import Turn, trace, turns_of
from benchmarks.answers.compared import (
    Deadline,
    Prefilled,
    Rows,
    along,
    distance,
    ends_of,
    feed_answer,
    greedy,
    plan_named,
    prefilled,
)
from kvsieve.report.tables import markdown_table

PLANS = "full;snapkv:budget=25%;perturn:budget=25%;rocketkv-mt:budget=512;kivi:bits=4"
WINDOWS = "0,32,64,256,all"
WANTED = {"reused": 0.9, "ratio": 0.12, "equal": 0.95}
ANEW = "anew"


class Session:
    """A conversation in a cache, edited from turn to turn.

    Attributes:
        window: tokens prefilled again after an edit, or "all".
        cache: of the conversation.
        ids: int64 [1, N], its tokens.
    """

    def __init__(self, sieve: Any, window: Any, begun: Prefilled, turn: Turn) -> None:
        self.sieve = sieve
        self.window = window
        self.cache = sieve.adopt(begun.cache.fork())
        self.ids = turn.prompt
        self.reply(turn)

    def become(self, turn: Turn) -> tuple[Prefilled, dict[str, Any]]:
        """Go on to a turn's prompt; return it prefilled, and counts of tokens."""
        began = time.perf_counter()
        edited = self.sieve.edit(self.cache, self.ids, window=self.window).become(turn.prompt[:, : turn.known])
        seconds = time.perf_counter() - began
        begun = prefilled(self.sieve, turn.prompt, self.cache, seconds)
        self.ids = turn.prompt
        counts = {"reused": edited.reused, "moved": edited.moved, "reread": edited.reread}
        return begun, {**counts, "edit_s": round(seconds, 4)}

    def reply(self, turn: Turn) -> None:
        feed_answer(self.sieve, self.cache, turn.reply)
        self.ids = torch.cat([self.ids, turn.reply], 1)


def compared(
    sieve: Any, sessions: list[Session], turn: Turn, number: int, limit: int, ends: list[int]
) -> list[dict[str, Any]]:
    """Return a row per session of one turn, which all of them and a new prefill take in turns."""
    order: list[Session | None] = [None, *sessions]
    at = number % len(order)
    found: dict[int, tuple[Prefilled, dict[str, Any]]] = {}
    anew: Prefilled | None = None
    for session in order[at:] + order[:at]:
        if session is None:
            anew = prefilled(sieve, turn.prompt)
        else:
            found[id(session)] = session.become(turn)
    assert anew is not None
    tokens, reference = greedy(sieve, anew, limit, ends)
    rows = []
    for session in sessions:
        begun, counts = found[id(session)]
        other = along(sieve, begun, tokens)
        rows.append(
            {
                "window": session.window,
                "turn": number,
                "prompt": turn.prompt.shape[1],
                "known": turn.known,
                **counts,
                "seconds": round(begun.seconds, 4),
                "anew_s": round(anew.seconds, 4),
                "answer": len(tokens),
                "equal": other.argmax(-1).tolist() == tokens,
                **distance(reference, other),
            }
        )
    return rows


def play(
    sieve: Any, turns: list[Turn], windows: list[Any], options: argparse.Namespace, ends: list[int]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each turn of a trace after the first; none of turns that are not compared."""
    begun = prefilled(sieve, turns[0].prompt)
    sessions = [Session(sieve, window, begun, turns[0]) for window in windows]
    for number, turn in enumerate(turns[1:], 1):
        rows = []
        if number % options.every == 0:
            rows = compared(sieve, sessions, turn, number, options.answer, ends)
            shown = [f"{row['window']}: {row['seconds']:.1f} s, {row['equal']}, {row['kl']:.4f}" for row in rows]
            new = f"anew {rows[0]['anew_s']:.1f} s"
            print(f"turn {number}, {turn.prompt.shape[1]} tokens; {new}; {'; '.join(shown)}", flush=True)
        else:
            for session in sessions:
                session.become(turn)
        for session in sessions:
            session.reply(turn)
        yield rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per plan and window."""
    by: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["plan"], row["window"]), []).append(row)
    return [{"plan": plan, "window": window, **_summed(mine)} for (plan, window), mine in by.items()]


def _summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def median(values: list[float], digits: int = 4) -> float:
        return round(statistics.median(values), digits)

    return {
        "turns": len(rows),
        "prompt": median([row["prompt"] for row in rows], 0),
        "reused": median([row["reused"] / row["known"] for row in rows]),
        "least_reused": round(min(row["reused"] / row["known"] for row in rows), 4),
        "prefilled": median([(row["prompt"] - row["reused"]) / row["prompt"] for row in rows]),
        "ratio": median([row["seconds"] / row["anew_s"] for row in rows]),
        "anew_s": median([row["anew_s"] for row in rows], 2),
        "equal": round(statistics.mean(row["equal"] for row in rows), 4),
        "kl": round(statistics.mean(row["kl"] for row in rows), 5),
        "kl_median": median([row["kl"] for row in rows], 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a directory or hub id (default: the demo model)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plans", default=PLANS, help="separated by semicolons")
    parser.add_argument("--windows", default=WINDOWS, help=f"tokens, or all (default: {WINDOWS})")
    parser.add_argument("--traces", type=int, default=1, help="conversations of each plan (default: 1)")
    parser.add_argument("--turns", type=int, default=30, help="of each trace (default: 30)")
    parser.add_argument("--kept", type=int, default=8, help="last tool results that are not cleared (default: 8)")
    parser.add_argument("--every", type=int, default=1, help="compare every n-th turn (default: 1)")
    parser.add_argument("--answer", type=int, default=24, help="most tokens of a compared answer (default: 24)")
    parser.add_argument("--minutes", type=float, help="end of the run (default: none)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "edits.json")
    options = parser.parse_args()
    model, tokenizer = kvsieve.models.load(options.model, dtype=getattr(torch, options.dtype))
    name = Path(options.model).name if options.model else kvsieve.models.fetch.MODEL_NAME
    settings = {"model": name, **{key: getattr(options, key) for key in ("dtype", "turns", "kept", "every", "answer")}}
    known = Rows(options.out, settings, model)
    windows = [window if window == "all" else int(window) for window in options.windows.split(",")]
    deadline = Deadline(options.minutes)
    ends = ends_of(model, tokenizer)
    last = (options.turns - 1) // options.every * options.every
    for number in range(options.traces):
        turns = list(turns_of(trace(number, options.turns), tokenizer, options.kept))
        for plan in options.plans.split(";"):
            place = {"plan": plan, "trace": number}
            missing = [window for window in windows if not known.of(**place, window=window, turn=last)]
            if not missing or deadline.passed:
                continue
            for window in missing:
                known.drop(**place, window=window)
            print(f"{plan}, trace {number}, windows {missing}", flush=True)
            with kvsieve.attach(model, plan_named(plan), tokenizer=tokenizer) as sieve:
                for rows in play(sieve, turns, missing, options, ends):
                    known.add([{**place, **row} for row in rows], summary)
                    if deadline.passed:
                        break
    if known.rows:
        table = summary(known.rows)
        print(markdown_table([*table[0]], [list(map(str, row.values())) for row in table]))
        print(f"wanted of full KV with the default window: {WANTED}")


if __name__ == "__main__":
    main()

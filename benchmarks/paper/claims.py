"""What became of the four papers' claims, from whatever results there are: benchmarks/results/paper/claims.md.

python -m benchmarks.paper.claims [--results benchmarks/results/paper]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import asl, fastkv, lagkv, rocketkv
from benchmarks.paper.common import RESULTS, Found, Study
from benchmarks.paper.verdicts import ACTED, FEW, MARGIN, verdict_table
from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT, LEVEL

STUDIES = (fastkv.STUDY, asl.STUDY, lagkv.STUDY, rocketkv.STUDY)
INTRO = f"""# What came out of the papers' claims

Written by `python -m benchmarks.paper.claims` from the results beside it. A comparison is one of differences between
two settings on the same samples, with an interval of 95%: Tango's score interval where scores are 0 or 1, Student's t
elsewhere (Gaffke's where fewer than {FEWEST_DIFFERENT} samples differ from the others), Clopper and Pearson's for a
share. "Better" came out where the interval is above 0, at least {FEWEST_DIFFERENT} samples differ and a sign-flip test
has p<{LEVEL:g}; it did not come out where a case's interval is below -{MARGIN:g} for scores and shares, below 0 for
other measures, with p<{LEVEL:g} over the number of cases. "No worse" came out where the interval is above -{MARGIN:g},
for which identical outcomes have to be 73; it did not come out where the interval is below -{MARGIN:g}.
Otherwise a claim is undecided. Fewer than {FEW} samples are shown and not counted. "Acted" is the number of samples in
which the method did something: a propagator left tokens out of deeper layers, an evictor dropped entries, a reader read
fewer than were stored. Where it acted in less than {ACTED:.0%}, a case is not counted, and a claim without any other is
refused. A claim about several cases came out only if all that count did. [coverage.md](../coverage.md) measures how
often the intervals hold and how often a verdict is false.
"""


def page(results: Path) -> str:
    text = [INTRO]
    for study in STUDIES:
        text.append(f"## {study.title}\n")
        folders = sorted(each for each in (results / study.name).glob("*") if each.is_dir())
        for folder in folders:
            text += [
                f"### {study.title}, {folder.name}\n",
                ran(study, folder),
                verdict_table(study.verdicts(Found(study.name, folder))),
            ]
        if not folders:
            text.append("Nothing has run yet.\n")
    return "\n".join(text)


def ran(study: Study, folder: Path) -> str:
    """Which parts have run, at which lengths and with how many samples."""
    found, parts, missing = Found(study.name, folder), [], []
    for part in study.parts:
        rows = found.costs(part.name) if part.times else found.rows(part.name)
        lengths = sorted({row["length"] for row in rows})
        if not lengths:
            missing.append(part.name)
            continue
        units = {
            n: len({(row.get("task"), row.get("sample", row.get("repeat"))) for row in rows if row["length"] == n})
            for n in lengths
        }
        parts.append(f"{part.name} ({', '.join(f'{length}: {units[length]}' for length in lengths)})")
    later = f" Not run yet: {', '.join(missing)}." if missing else ""
    return f"Ran, with prompt tokens and samples: {'; '.join(parts) or 'nothing'}.{later}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    given.results.mkdir(parents=True, exist_ok=True)
    text = page(given.results)
    (given.results / "claims.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

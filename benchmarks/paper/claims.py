"""What became of the four papers' claims, from whatever results there are: benchmarks/results/paper/claims.md.

python -m benchmarks.paper.claims [--results benchmarks/results/paper]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import asl, fastkv, lagkv, rocketkv
from benchmarks.paper.common import RESULTS, Found, Study
from benchmarks.paper.verdicts import FEW, LEAST, MARGIN, verdict_table

STUDIES = (fastkv.STUDY, asl.STUDY, lagkv.STUDY, rocketkv.STUDY)
INTRO = f"""# What came out of the papers' claims

Written by `python -m benchmarks.paper.claims` from the results beside it. A comparison is one of differences between
two settings on the same samples, with an interval of 95%: Gaffke's for scores, which allows for outcomes that were not
seen (of 0 and 1 it is Clopper and Pearson's); Student's t for KL; Wilson's for a share. "Better" came out where the
interval lies above 0, "no worse" where it lies above -{MARGIN:g}, for which identical outcomes have to be 73; it did
not come out where the interval lies below 0; otherwise, and with fewer than {LEAST} samples, it is undecided. A claim
about several cases came out only if all of them did. Fewer than {FEW} samples are marked "few".
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
    found, told, missing = Found(study.name, folder), [], []
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
        told.append(f"{part.name} ({', '.join(f'{length}: {units[length]}' for length in lengths)})")
    later = f" Not run yet: {', '.join(missing)}." if missing else ""
    return f"Ran, with prompt tokens and samples: {'; '.join(told) or 'nothing'}.{later}\n"


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

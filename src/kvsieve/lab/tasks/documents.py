"""Questions about generated documents: RULER's two question answering types without a download."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit_padded
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import match_any
from kvsieve.lab.tasks.words import COUNTRIES, FIRST_NAMES, LAST_NAMES, TOWNS

_JOBS = "baker clockmaker botanist pilot sculptor chemist carpenter librarian violinist geologist".split()
_SIGHTS = ("bridge", "harbor", "market", "tower", "park")
_PRIZES = "medal of the academy,silver compass,state prize,golden feather,city cup".split(",")


@dataclass(frozen=True)
class Documents(Generated):
    """Numbered documents about people and towns; questions on one fact (`hops` 1), or one joining two documents (2)."""

    hops: int = 1

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        towns = {town: rng.choice(COUNTRIES) for town in TOWNS}
        names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        rng.shuffle(names)
        town_of = {name: rng.choice(TOWNS) for name in names}
        person = names[0]
        place = rng.random()
        more = rng.getrandbits(32)
        town = town_of[person]
        about = [_person(rng, person, town)]
        if self.hops == 1:
            turn = QuestionAnswer(
                f"In which town was {person} born?", (town,), match_any, 16, prefix=f"{person} was born in"
            )
        else:
            about.append(_town(rng, town, towns[town]))
            country = towns[town]
            question = f"In which country lies the town where {person} was born?"
            turn = QuestionAnswer(
                question, (country,), match_any, 16, prefix=f"The town where {person} was born lies in"
            )

        def make(extra: int, filler: str) -> Sample:
            fresh = random.Random(more)
            others = []
            for i in range(extra):
                if self.hops == 2 and i % 3 == 2:
                    other = fresh.choice([place for place in TOWNS if place != town])
                    others.append(_town(fresh, other, towns[other]))
                else:
                    # People of another town, so that the town does not give the answer away.
                    name = names[1 + i % (len(names) - 1)]
                    home = town_of[name] if town_of[name] != town else TOWNS[TOWNS.index(town) - 1]
                    others.append(_person(fresh, name, home))
            documents = list(others)
            for offset, document in enumerate(about):
                documents.insert(round((place + 0.45 * offset) % 1 * len(documents)), document)
            body = "\n\n".join(f"Document {i + 1}: {document}" for i, document in enumerate(documents))
            intro = f"Answer the question from the given documents. Give only the answer. {filler}".strip()
            return Sample(f"{intro}\n\n{body}", (turn,), meta={"depth": place})

        return fit_padded(make, count, length, self.name)


def _person(rng: random.Random, name: str, town: str) -> str:
    year = rng.randrange(1850, 1990)
    return (
        f"{name}\n{name} was born in {town} in {year}. After school {name.split()[0]} worked as a {rng.choice(_JOBS)} "
        f"for {rng.randrange(2, 30)} years and received the {rng.choice(_PRIZES)} in {year + rng.randrange(25, 60)}."
    )


def _town(rng: random.Random, town: str, country: str) -> str:
    return (
        f"{town}\n{town} is a town in {country} with {rng.randrange(2, 90)} thousand inhabitants. It was founded in "
        f"{rng.randrange(900, 1700)} and is known for its {rng.choice(_SIGHTS)}."
    )

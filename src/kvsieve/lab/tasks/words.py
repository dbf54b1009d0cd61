"""Words for names and keys in generated tasks."""

from __future__ import annotations

import random

ADJECTIVES = tuple(
    "amber ancient brave bright calm clever cold copper crimson curious distant eager early empty faint famous fierce "
    "frozen gentle giant glad golden grand green happy hidden hollow honest humble icy idle ivory jolly keen kind late "
    "lively lonely lucky mellow mighty misty modern narrow noble odd pale patient plain proud purple quick quiet rapid "
    "rare rusty sharp shiny silent silver simple sleepy smooth solid stormy strange sunny swift tall tiny "
    "warm wild wise".split()
)
NOUNS = tuple(
    "anchor apple arrow badge bakery barrel basket beacon bell bottle bridge bucket button cabin camera candle canyon "
    "castle cellar chapel circus cloud compass corner cottage desert dragon engine falcon farm feather ferry forest "
    "fountain garden glacier guitar hammer harbor helmet island jacket kettle kitchen ladder lantern library lion "
    "market meadow mirror mountain museum needle ocean orchard palace parrot pencil piano pillow pocket puppet rabbit "
    "ribbon saddle school shadow spoon station statue temple theatre ticket tower tunnel "
    "valley violin wagon window".split()
)
FIRST_NAMES = tuple(
    "Alma Bruno Clara Dario Edith Felix Greta Hugo Irene Jonas Klara Leon Marta Nils Olga Pavel Rosa Simon Tilda "
    "Viktor Wanda Yusuf Zora Anton Berta Cyril Doris Emil Flora Georg".split()
)
LAST_NAMES = tuple(
    "Abelin Brandt Corvin Dressel Eklund Farkas Gorski Hallen Ilves Jansky Kestrel Lindqvist Moravec Norling Ostrow "
    "Petrov Quist Rademaker Solberg Tamm Ullman Varga Weiland Ylonen Zeman Arvid Bellini Castell Dorn Engel".split()
)
TOWNS = tuple(
    "Arvanta Belmora Cintrava Dunhollow Eskeria Farnwick Galdora Hestmark Inverloch Jorvalla Kellmoor Lorvik Mistral "
    "Nordhagen Olvera Pellworth Quarnfeld Rosmere Stellaro Tarnwood Ulverston Valtessa Westerly Yarnmouth Zelkova "
    "Ambrose Brinmoor Caldera Drumlin Elmsworth".split()
)
COUNTRIES = tuple("Austrania Borlund Cestonia Dalvaria Elvonia Feronia Galdania Hestria Iberland Jutania".split())


def word_keys(rng: random.Random, count: int) -> list[str]:
    size = len(ADJECTIVES) * len(NOUNS)
    picked = rng.sample(range(size), min(count, size))
    keys = [f"{ADJECTIVES[pair // len(NOUNS)]}-{NOUNS[pair % len(NOUNS)]}" for pair in picked]
    # Only prompts far beyond 128K tokens need more than there are pairs.
    return keys + [f"{keys[i % size]}-{i // size + 2}" for i in range(count - size)]


def numbers(rng: random.Random, count: int, figures: int = 7) -> list[str]:
    return [str(number) for number in rng.sample(range(10 ** (figures - 1), 10**figures), count)]


def uuids(rng: random.Random, count: int) -> list[str]:
    drawn = (f"{rng.getrandbits(128):032x}" for _ in range(count))
    return [f"{figures[:8]}-{figures[8:12]}-{figures[12:16]}-{figures[16:20]}-{figures[20:]}" for figures in drawn]

# ruff: noqa: E501, SIM905 (tables of phrases and words)
"""Owns the names and made-up words that fill the generated dialogues.

Made-up words teach copying: a word or a pair of names is on one side of the split for ever, so held-out tasks
ask for values that training never showed.
"""

from __future__ import annotations

import random

from .holdout import draw

FIRST = """Ada Adam Aisha Alan Alice Amir Ana Andre Anna Aria Arjun Astrid Ben Bianca Boris Bruno Camille Carla Carlos Cedric Chen
Chloe Clara Daniel Daria David Diego Dmitri Elena Elias Ella Emil Emma Eric Eva Fatima Felix Fiona Frank Gabriel Gina Grace Guido Hana
Hannah Hans Harry Hassan Helen Hugo Ian Ida Igor Ines Irene Isaac Ivan Jack Jana Jane Jonas Jose Julia Karim Karl Kate Kenji Kevin
Laila Lars Laura Leo Lena Liam Lina Linda Lucas Lucy Luis Maja Marco Maria Marie Mark Marta Max Mei Mia Milan Mina Mohammed Nadia Nina
Noah Nora Olga Oliver Omar Oscar Paul Paula Pedro Peter Petra Priya Rahul Raj Rania Rita Robert Rosa Ruth Sam Samir Sara Sergei Simon
Sofia Stefan Sven Tara Theo Thomas Tina Tom Uma Vera Victor Wei Yara Yuki Yusuf Zara Zoe""".split()
LAST = """Adams Ahmed Allen Anders Bauer Becker Bell Berg Brown Cohen Costa Cruz Davis Diaz Dubois Evans Fischer Foster Garcia Gomez
Gray Green Gupta Hall Hansen Hoffman Hughes Ito Ivanov Jansen Johnson Jones Kaya Keller Khan Kim King Klein Kovacs Kumar Larsen Lee
Lewis Lopez Martin Mendez Meyer Miller Moore Moreau Mori Morris Nagy Nguyen Novak Olsen Owens Park Patel Perez Petrov Peters Popov
Quinn Reed Rossi Russo Sato Schmidt Silva Singh Smith Sorensen Stone Suzuki Tanaka Taylor Turner Varga Vogel Wagner Walker Wang Weber
White Wilson Wong Wright Yamada Young Zhang Zimmer""".split()
CITIES = """Amsterdam Athens Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago Copenhagen Dakar Delhi Denver
Dublin Geneva Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Melbourne Miami Milan Montreal
Moscow Mumbai Munich Nairobi Naples Osaka Oslo Ottawa Paris Porto Prague Quito Riga Rome Rotterdam Santiago Seattle Seoul Shanghai
Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis Turin Utrecht Vienna Vilnius Warsaw Zagreb Zurich""".split()
JOBS = """accountant architect baker carpenter chef chemist dentist designer developer doctor driver editor electrician engineer farmer
florist gardener geologist journalist lawyer librarian mechanic musician nurse painter pharmacist photographer pilot plumber professor
researcher sailor scientist singer student teacher tailor translator vet waiter writer""".split()
COMPANIES = """Acme Globex Initech Umbra Northwind Contoso Fabrikam Lumen Vertex Orbit Nimbus Solaria Bluepeak Redwood Ironbridge
Greenfield Skylark Brightwater Cobalt Falcon""".split()
PRODUCTS = """laptop phone tablet monitor keyboard mouse printer camera headset speaker router chair desk lamp sofa bicycle helmet
backpack jacket toaster kettle blender drill hammer ladder tent watch guitar piano drone scanner charger""".split()
COLOURS = "red blue green black white yellow orange purple grey silver brown pink".split()
STREETS = "Oak Street,Maple Avenue,High Street,Park Road,Mill Lane,Station Road,Church Street,King Street,River Road,Hill View".split(
    ","
)

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kl pl pr sh sk sl st th tr".split()
_VOWELS = "a e i o u a e i o ai ea io ou".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "m", "t", "k", "x", "nd", "rt"]


def made_up(rng: random.Random, held_out: bool = False) -> str:
    """A pronounceable capitalised word that is hardly any language's."""

    def sample(r: random.Random) -> str:
        syllables = r.choices((1, 2, 3), (2, 6, 3))[0]
        word = "".join(r.choice(_ONSETS) + r.choice(_VOWELS) + r.choice(_CODAS) for _ in range(syllables))
        return word.capitalize()

    return draw(rng, held_out, sample, lambda word: ("word", word))


def full_name(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A first and a last name; the pair decides the side, or a made-up word in it does."""
    kind = rng.random()
    if kind < 0.6:
        return draw(rng, held_out, lambda r: (r.choice(FIRST), r.choice(LAST)), lambda pair: ("name", *pair))
    if kind < 0.8:
        return rng.choice(FIRST), made_up(rng, held_out)
    return made_up(rng, held_out), made_up(rng, held_out)


def place(rng: random.Random) -> str:
    """A city, one in three made up."""
    return rng.choice(CITIES) if rng.random() < 0.67 else made_up(rng)


def code(rng: random.Random, held_out: bool = False) -> str:
    """An order or part number such as AB-4821."""

    def sample(r: random.Random) -> str:
        letters = "".join(r.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(r.choice((1, 2, 2, 3))))
        digits = "".join(r.choice("0123456789") for _ in range(r.randint(3, 6)))
        return letters + r.choice(("-", "", "-")) + digits

    return draw(rng, held_out, sample, lambda value: ("code", value))

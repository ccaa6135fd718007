"""A `Story` collects the sentences and the worked steps of one word problem.

It owns the random source, the word lists, the `[this|that]` phrase choice and the `<<expr=value>>` annotations.
It knows no template. Invariant: a step whose value is not a whole number in [2, 9999] raises `Reject`, so whatever
comes out is arithmetically right and small enough for digit-level tokens.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from types import CodeType


def _words(text: str) -> list[str]:
    return text.split()


def _entries(text: str) -> list[str]:
    return text.split(",")


WOMEN = _words(
    "Natalia Maria Emma Olivia Ava Sophia Mia Amelia Harper Ella Grace Chloe Nora Lily Zoe Hannah Leah Ruby "
    "Alice Clara Julia Lucy Anna Sarah Bella Elena Jasmine Maya Naomi Priya Aisha Fatima Mei Yuki Ingrid Carmen "
    "Rosa Tanya Kate Rachel Diana Helen Irene Janet Kim Laura Megan Nina Paula Tina Wendy Betty Carla Daisy "
    "Ellen Fiona Gina Ivy"
)
MEN = _words(
    "Liam Noah Oliver James Lucas Henry Jack Leo Daniel Samuel Owen Caleb Isaac Nathan Ryan Adam Ben Carl David "
    "Eric Frank George Hugo Ivan Jason Kevin Luke Mark Nick Oscar Paul Quentin Robert Steve Tom Victor Will "
    "Xavier Zach Ahmed Omar Raj Kenji Diego Carlos Mateo Pedro Andre Jamal Malik Felix Martin Peter Simon Tim "
    "Walter Alan Brian Colin"
)
PEOPLE = WOMEN + MEN
THINGS = _entries(
    "marbles,stickers,shells,stamps,coins,beads,buttons,postcards,crayons,pencils,erasers,notebooks,balloons,"
    "cards,pens,magnets,badges,ribbons,toy cars,comic books,rubber bands,paper cranes,baseball cards,"
    "puzzle pieces,building blocks,photos,keychains,candles,bracelets,clips,pins,markers,books,dolls,rocks,"
    "feathers,leaves,plants,posters,hats"
)
FOODS = _words(
    "apples oranges pears peaches plums bananas lemons mangoes cookies muffins cupcakes brownies donuts pretzels "
    "candies sandwiches tacos pies rolls bagels carrots tomatoes potatoes cucumbers peppers strawberries "
    "cherries walnuts grapes"
)
ANIMALS = _words("cows sheep goats horses pigs rabbits ducks hens geese llamas ponies alpacas donkeys turkeys")
COLOURS = _words("red blue green yellow purple orange white black pink silver")
PLACES = _entries(
    "market,school fair,flea market,corner store,farm stand,town hall,library,community center,mall,"
    "garden center,museum,craft fair,supermarket,bookstore,bakery,county fair,toy store"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
KIN = _words("cousin friend neighbor classmate roommate teammate partner coworker")
GEAR = _entries("bike,tablet,skateboard,guitar,camera,telescope,keyboard,tent,game console,sewing machine,drone,watch")


class Reject(Exception):
    """The numbers drawn do not fit the template; draw again."""


@cache
def _phrase(text: str) -> tuple[str | tuple[str, ...], ...]:
    parts = re.split(r"\[([^\]]*)\]", text)
    return tuple(tuple(p.split("|")) if i % 2 else p for i, p in enumerate(parts))


@cache
def _expression(expr: str) -> tuple[tuple[str, ...], CodeType]:
    return tuple(re.split(r"([a-z]\w*)", expr)), compile(expr, "<step>", "eval")


class Story:
    """One problem being written: `n` draws numbers, `tell` and `ask` add sentences, `step` adds a worked line."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told: list[str] = []
        self.lines: list[str] = []
        self.answer = 0
        self.quiet = False
        self.spaced = rng.random() < 0.25
        self.tight = rng.random() < 0.25
        first, second, third = rng.sample(PEOPLE, 3)
        he, his, him = ("she", "her", "her") if first in WOMEN else ("he", "his", "him")
        thing, other = rng.sample(THINGS, 2)
        food, fruit = rng.sample(FOODS, 2)
        day, later = rng.sample(DAYS, 2)
        month, month2 = rng.sample(MONTHS, 2)
        colour, colour2 = rng.sample(COLOURS, 2)
        animal, beast = rng.sample(ANIMALS, 2)
        self.vars: dict[str, object] = {"A": first, "B": second, "C": third, "he": he, "his": his, "him": him}
        self.put(He=he.title(), His=his.title(), thing=thing, other=other, food=food, fruit=fruit, day=day, later=later)
        self.put(month=month, month2=month2, colour=colour, colour2=colour2, animal=animal, beast=beast)
        self.put(place=rng.choice(PLACES), kin=rng.choice(KIN), gear=rng.choice(GEAR))

    def n(self, **ranges: tuple[int, ...]) -> None:
        """Draw each number from (low, high) or (low, high, step), both ends included."""
        for name, (low, high, *by) in ranges.items():
            grain = by[0] if by else 1
            self.vars[name] = low + grain * self.rng.randrange((high - low) // grain + 1)

    def put(self, **values: object) -> None:
        self.vars.update(values)

    def one(self, *options: str) -> str:
        return self.rng.choice(options)

    def need(self, condition: str) -> None:
        """Reject unless the condition on the drawn numbers holds."""
        if not eval(_expression(condition)[1], {"__builtins__": {}}, self.vars):
            raise Reject(condition)

    def fill(self, text: str) -> str:
        choice = self.rng.choice
        line = "".join(p if isinstance(p, str) else choice(p) for p in _phrase(text)).format_map(self.vars)
        line = line.replace(" .", ".").replace(" ?", "?")  # an empty choice leaves its blank behind
        return line[0].upper() + line[1:]

    def tell(self, text: str) -> None:
        self.told.append(self.fill(text))

    ask = tell

    def step(self, name: str, expr: str, text: str) -> None:
        """Work out `name = expr`; `{=}` in the text is the equation, `{$}` the same in dollars."""
        parts, code = _expression(expr)
        exact = eval(code, {"__builtins__": {}}, self.vars)
        value = int(exact)
        if value != exact or not 2 <= value <= 9999:
            raise Reject(expr)
        plain = "".join(str(self.vars[p]) if i % 2 else p for i, p in enumerate(parts))
        shown = re.sub(r"([-+*/])", r" \1 ", plain) if self.spaced else plain
        equals = "=" if self.tight and not self.spaced else " = "
        note = f"<<{plain}={value}>>{value}"
        self.vars |= {name: value, "=": f"{shown}{equals}{note}", "$": f"${shown}{equals}${note}"}
        self.lines.append(self.fill(text))
        self.answer = value

    def problem(self) -> dict[str, str]:
        return {"question": " ".join(self.told), "answer": "\n".join([*self.lines, f"#### {self.answer}"])}


TEMPLATES: list[Callable[[Story], None]] = []


def template(write: Callable[[Story], None]) -> Callable[[Story], None]:
    """Register a function that tells one kind of story."""
    TEMPLATES.append(write)
    return write

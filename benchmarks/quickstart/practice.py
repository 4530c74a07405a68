"""Copying practice: an auxiliary task for the target's training, never part of the demo's conversations.

A small model learns late to copy a name from the prompt: it first emits whichever name is frequent. Measured here, on
conversations alone, 0.8M tokens gave fluent answers about the wrong person in the wrong city. Repeating lists and
looking up fields train the two halves of copying, which value and from where. Nearly every answer token carries a
training signal, over the same names, places and numbers that the conversations use.

The effect in the shipped model is partial: numbers, identifiers and phrases are copied, names mostly are not (figures
in the model card).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from benchmarks.quickstart.corpus.chat import ACTIVITIES, CONCEPTS, GOALS, INTERESTS, THINGS
from benchmarks.quickstart.corpus.code import ARGUMENTS, FILTERS, REDUCTIONS
from benchmarks.quickstart.corpus.conversation import Chat, assistant, user
from benchmarks.quickstart.corpus.streams import Conversation, is_held_out, user_prompts
from benchmarks.quickstart.corpus.tools import CUISINES, CURRENCIES, SKIES, TITLES
from benchmarks.quickstart.corpus.words import (
    CITIES,
    COLOURS,
    GOODS,
    MONTHS,
    NAMES,
    STREETS,
    SUBJECTS,
    SURNAMES,
    WEEKDAYS,
    clock,
)

FIELDS: dict[str, Callable[[Random], str]] = {
    "name": lambda rng: rng.choice(NAMES),
    "friend": lambda rng: rng.choice(NAMES),
    "surname": lambda rng: rng.choice(SURNAMES),
    "city": lambda rng: rng.choice(CITIES),
    "item": lambda rng: rng.choice(GOODS),
    "colour": lambda rng: rng.choice(COLOURS),
    "day": lambda rng: rng.choice(WEEKDAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "street": lambda rng: rng.choice(STREETS),
    "number": lambda rng: str(rng.randint(0, 99)),
    "total": lambda rng: str(rng.randint(100, 999)),
    "time": clock,
    "subject": lambda rng: rng.choice(SUBJECTS),
    "argument": lambda rng: rng.choice(ARGUMENTS),
    "function": lambda rng: f"{rng.choice(REDUCTIONS)[2]}_{rng.choice(FILTERS)[2]}_{rng.randint(2, 60)}",
    "thing": lambda rng: rng.choice(THINGS),
    "goal": lambda rng: rng.choice(list(GOALS)),
    "activity": lambda rng: rng.choice(ACTIVITIES),
    "topic": lambda rng: rng.choice(list(CONCEPTS)),
    "interest": lambda rng: rng.choice(list(INTERESTS)),
    "currency": lambda rng: rng.choice(CURRENCIES),
    "food": lambda rng: rng.choice(CUISINES),
    "sky": lambda rng: rng.choice(SKIES),
    "title": lambda rng: rng.choice(TITLES),
}


def repeat(rng: Random) -> Chat:
    """A list, repeated word for word."""
    fields, mark = list(FIELDS), rng.choice((", ", " ", "\n", " and "))
    items = mark.join(FIELDS[rng.choice(fields)](rng) for _ in range(rng.randint(6, 24)))
    return Chat([user(f"{rng.choice(('Repeat', 'Say this again', 'Copy'))}: {items}"), assistant(items)])


def look_up(rng: Random) -> Chat:
    """A record, then its fields in another order."""
    fields = rng.sample(list(FIELDS), rng.randint(6, 14))
    record = {field: FIELDS[field](rng) for field in fields}
    asked = rng.sample(fields, rng.randint(4, len(fields)))
    mark = rng.choice((": ", " is ", " = "))
    facts = rng.choice((", ", ". ", "\n")).join(f"{field}{mark}{value}" for field, value in record.items())
    answer = "\n".join(f"{field}: {record[field]}" for field in asked)
    return Chat([user(f"{facts}\nNow tell me the {', '.join(asked)}."), assistant(answer)])


def practice_stream(seed: int) -> Iterator[Conversation]:
    """Endless practice conversations. As in the corpus, no user message is held out."""
    index = 0
    while True:
        rng = Random(f"practice:{seed}:{index}")
        maker = rng.choice((repeat, look_up))
        chat = maker(rng)
        if not any(map(is_held_out, user_prompts(chat.messages))):
            yield Conversation("practice", maker.__name__, chat)
        index += 1

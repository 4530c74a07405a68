"""The pools of words that every family of the quickstart corpus draws from.

Names, cities and goods are pools rather than literals inside the families so that one name turns up in a letter, in a
sum and in a tool call alike: the target then learns to copy a name from the prompt instead of remembering where it
belongs. That copying is what makes answers depend on prompts, and it is what a drafter has to learn as well.

Everything here is invented or common knowledge; nothing is taken from a data set. Editing a pool changes every
conversation that is generated afterwards and with it the corpus digest recorded in `target/card.json`, so a change
here means training the target again.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

NAMES = ["Ada", "Amir", "Anna", "Ben", "Bruno", "Carla", "Chloe", "Daniel", "Dina", "Elena", "Emil", "Eva", "Farid",
         "Felix", "Grace", "Hana", "Hugo", "Ida", "Ines", "Ivan", "Jonas", "Julia", "Kai", "Karim", "Lara", "Leo",
         "Lina", "Lucas", "Maja", "Marco", "Maria", "Mia", "Milan", "Nadia", "Nils", "Nora", "Olga", "Omar", "Otto",
         "Paula", "Petra", "Priya", "Rafael", "Rosa", "Ruth", "Sami", "Sara", "Simon", "Sofia", "Tariq", "Theo", "Tom",
         "Uma", "Vera", "Victor", "Wanda", "Yara", "Yusuf", "Zoe"]

SURNAMES = ["Adler", "Bauer", "Castro", "Diaz", "Ebert", "Fischer", "Garcia", "Haddad", "Ito", "Jansen", "Kovac",
            "Lang", "Meyer", "Novak", "Okafor", "Patel", "Quist", "Rossi", "Silva", "Tanaka", "Urban", "Vogel",
            "Weber", "Young", "Zeller"]

CITIES = ["Athens", "Basel", "Berlin", "Bergen", "Cairo", "Dublin", "Geneva", "Ghent", "Hamburg", "Helsinki", "Kyoto",
          "Leeds", "Lima", "Lisbon", "Lyon", "Madrid", "Malmo", "Milan", "Oslo", "Paris", "Porto", "Prague", "Quito",
          "Riga", "Rome", "Seville", "Sofia", "Tokyo", "Turin", "Vienna", "Warsaw", "Zagreb", "Zurich"]

GOODS = ["apples", "bananas", "bottles", "brushes", "candles", "cups", "forks", "jars", "lamps", "lemons", "mugs",
         "notebooks", "oranges", "pears", "pencils", "plates", "posters", "ribbons", "rulers", "scarves", "spoons",
         "stamps", "tickets", "tiles", "towels"]

COLOURS = ["red", "blue", "green", "yellow", "black", "white", "grey", "orange", "purple", "brown"]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December"]
STREETS = ["Mill", "Oak", "River", "Station", "Market", "Church", "Garden", "Bridge", "Park", "Hill", "Lake", "Castle"]
SUBJECTS = ["history", "geography", "biology", "chemistry", "physics", "music", "Spanish", "French", "German", "art"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
                "twelve"]


def two(rng: Random, pool: Sequence[str]) -> tuple[str, str]:
    """Two different entries of a pool, in random order."""
    first, second = rng.sample(pool, 2)
    return first, second


def listing(items: Sequence[str], last: str = "and") -> str:
    """`["a", "b", "c"]` as `a, b and c`."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def clock(rng: Random) -> str:
    """A time of day as 24-hour clock, on the quarter."""
    return f"{rng.randint(7, 21):02d}:{rng.choice(('00', '15', '30', '45'))}"

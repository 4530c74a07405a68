"""The `code` family: short Python functions with docstrings, data classes, SQL, and reading code.

Functions are composed from a filter, a map and a reduction, so the space of tasks is a product and the code follows
from the wording: the answer is nearly forced once its function name is chosen. Every Python answer is valid and
does what its docstring says; `test_corpus.py` parses a sample.
"""

from __future__ import annotations

from random import Random

from benchmarks.quickstart.corpus.conversation import Chat, assistant, user
from benchmarks.quickstart.corpus.words import NAMES, SUBJECTS, listing

# phrase in the request, condition on the loop variable `n`, word in the function's name
FILTERS = (
    ("even", "n % 2 == 0", "even"), ("odd", "n % 2 == 1", "odd"), ("positive", "n > 0", "positive"),
    ("negative", "n < 0", "negative"),
)
MAPS = (("", "n", ""), ("squared ", "n * n", "squared_"), ("doubled ", "2 * n", "doubled_"),
        ("halved ", "n / 2", "halved_"),
        ("absolute ", "abs(n)", "absolute_"))
REDUCTIONS = (("sum", "sum({})", "sum"), ("largest", "max({})", "largest"), ("smallest", "min({})", "smallest"),
              ("list", "[{}]", "list"))
ARGUMENTS = ("numbers", "values", "items", "data", "scores", "prices")

WORD_TESTS = (("start with '{c}'", "w.startswith('{c}')"), ("end with '{c}'", "w.endswith('{c}')"),
              ("contain '{c}'", "'{c}' in w"),
              ("are longer than {k} letters", "len(w) > {k}"),
              ("have exactly {k} letters", "len(w) == {k}"))
WORD_MAPS = (("", "w"), (" in upper case", "w.upper()"), (" in lower case", "w.lower()"), (" reversed", "w[::-1]"))

ENTITIES: dict[str, tuple[tuple[str, str], ...]] = {
    "Book": (("title", "str"), ("author", "str"), ("pages", "int"), ("price", "float"), ("year", "int")),
    "Car": (("brand", "str"), ("colour", "str"), ("doors", "int"), ("price", "float"), ("year", "int")),
    "Student": (("name", "str"), ("age", "int"), ("grade", "float"), ("school", "str"), ("active", "bool")),
    "Order": (("customer", "str"), ("product", "str"), ("quantity", "int"), ("price", "float"), ("paid", "bool")),
    "Room": (("number", "int"), ("floor", "int"), ("area", "float"), ("owner", "str"), ("free", "bool")),
    "Recipe": (("title", "str"), ("minutes", "int"), ("portions", "int"), ("author", "str"), ("vegan", "bool")),
    "Song": (("title", "str"), ("artist", "str"), ("seconds", "int"), ("rating", "float"), ("year", "int")),
}
SAMPLES = {"str": "'{w}'", "int": "{i}", "float": "{i}.5", "bool": "True"}
TABLES = {"orders": ("customer", "total", "city", "date"), "employees": ("name", "salary", "team", "age"),
          "books": ("title", "author", "price", "year"), "trips": ("driver", "distance", "city", "cost")}
NUMERIC = {"orders": "total", "employees": "salary", "books": "price", "trips": "distance"}


def _answer(rng: Random, code: str, notes: tuple[str, ...], language: str = "python") -> str:
    lead = rng.choice(("Here is the function:", "You can write it like this:", "Sure:",
                       "This does the job:")) if language == "python" else (
        rng.choice(("Here is the query:", "This query does it:")))
    return f"{lead}\n\n```{language}\n{code}\n```\n\n{rng.choice(notes)}"


def numbers_function(rng: Random) -> Chat:
    if rng.random() < 0.4:
        k = rng.randint(2, 60)
        kind, condition, word = rng.choice(((f"greater than {k}", f"n > {k}", f"above_{k}"),
                                            (f"less than {k}", f"n < {k}", f"below_{k}"),
                                            (f"divisible by {k}", f"n % {k} == 0", f"by_{k}")))
        phrase = f"numbers {kind}"
    else:
        kind, condition, word = rng.choice(FILTERS)
        phrase = f"{kind} numbers"
    (map_phrase, expression, map_word), (red, call, red_word) = rng.choice(MAPS), rng.choice(REDUCTIONS)
    arg = rng.choice(ARGUMENTS)
    name = f"{red_word}_{map_word}{word}"
    what = f"the {red} of the {map_phrase}{phrase}"
    ask = rng.choice((f"Write a Python function `{name}` that returns {what} in `{arg}`.",
                      f"I need a Python function that returns {what}. Call it `{name}`; the argument is `{arg}`.",
                      f"How do I compute {what} in a list `{arg}` in Python? "
                      f"Please name the function `{name}`."))
    body = call.format(f"{expression} for n in {arg} if {condition}")
    code = f'def {name}({arg}):\n    """Return {what}."""\n    return {body}'
    notes = (f"It keeps the {phrase} and returns the {red}.", f"The condition `{condition}` selects the {phrase}.",
             f"Call it as `{name}({arg})`.")
    messages = [user(ask), assistant(_answer(rng, code, notes))]
    if rng.random() < 0.35:
        returns = "list[float]" if red == "list" else "float"
        typed = f'def {name}({arg}: list[float]) -> {returns}:\n    """Return {what}."""\n    return {body}'
        messages += [user(rng.choice((f"Please add type hints to `{name}`.",
                                      f"Can you add types to `{name}` and its argument `{arg}`?"))),
                     assistant(_answer(rng, typed,
                                       (f"Now `{arg}` is a list of floats.",
                                        "The behaviour has not changed.")))]
    return Chat(messages)


def words_function(rng: Random) -> Chat:
    letter, k = rng.choice("abcdefghilmnoprstuvw"), rng.randint(3, 9)
    (test, condition), (map_phrase, expression) = rng.choice(WORD_TESTS), rng.choice(WORD_MAPS)
    test, condition = test.format(c=letter, k=k), condition.format(c=letter, k=k)
    subject = rng.choice(SUBJECTS).lower()
    name = f"{rng.choice(('find', 'pick', 'select', 'get'))}_{subject}_words"
    what = f"all words{map_phrase} that {test}"
    ask = rng.choice((f"Write a Python function `{name}(words)` which returns {what}.",
                      f"In Python, how can `{name}` return {what}? It takes a list `words`."))
    loop = rng.random() < 0.5
    if loop:
        code = (f'def {name}(words):\n    """Return {what}."""\n    found = []\n    for w in words:\n'
                f"        if {condition}:\n            found.append({expression})\n    return found")
    else:
        code = f'def {name}(words):\n    """Return {what}."""\n    return [{expression} for w in words if {condition}]'
    notes = (f"It looks at each word and checks `{condition}`.", f"Words that {test} are kept.",
             "An empty list is returned when nothing matches.")
    return Chat([user(ask), assistant(_answer(rng, code, notes))])


def data_class(rng: Random) -> Chat:
    entity = rng.choice(list(ENTITIES))
    fields = rng.sample(ENTITIES[entity], rng.randint(2, 4))
    listed = listing([f"`{f}` ({t})" for f, t in fields])
    owner = rng.choice(NAMES)
    ask = rng.choice((f"Write a Python data class `{entity}` with the fields {listed} for {owner}'s project.",
                      f"{owner} needs a dataclass `{entity}` with {listed}. Please write it."))
    code = "\n".join(("from dataclasses import dataclass", "", "", "@dataclass", f"class {entity}:",
                      f'    """A {entity.lower()} with {listing([f for f, _ in fields])}."""', "",
                      *(f"    {f}: {t}" for f, t in fields)))
    values = ", ".join(SAMPLES[t].format(w=owner, i=rng.randint(1, 90)) for _, t in fields)
    notes = (f"Create one with `{entity}({values})`.", f"The class has {len(fields)} fields.",
             f"I hope this helps {owner}.")
    return Chat([user(ask),
                 assistant(_answer(rng, code, notes).replace("Here is the function:", "Here is the class:"))])


def sql(rng: Random) -> Chat:
    table = rng.choice(list(TABLES))
    columns, number = rng.sample(TABLES[table], 2), NUMERIC[table]
    limit, k = rng.randint(10, 990), rng.randint(2, 20)
    more, down = rng.random() < 0.5, rng.random() < 0.5
    ask = rng.choice((
        f"Write an SQL query for the {columns[0]} and {columns[1]} of all {table} with a {number} "
        f"{'above' if more else 'below'} {limit}, "
        f"{'highest' if down else 'lowest'} {number} first, at most {k} rows.",
        f"From the table {table}, select {columns[0]} and {columns[1]} where {number} is {'more' if more else 'less'} "
        f"than {limit}. "
        f"Sort by {number}, {'descending' if down else 'ascending'}, and show {k} rows.",
    ))
    code = (f"SELECT {columns[0]}, {columns[1]}\nFROM {table}\nWHERE {number} {'>' if more else '<'} {limit}\n"
            f"ORDER BY {number} {'DESC' if down else 'ASC'}\nLIMIT {k};")
    notes = (f"The condition keeps {table} with a {number} {'above' if more else 'below'} {limit}.",
             f"It returns at most {k} rows.",
             f"The rows are sorted by {number}.")
    return Chat([user(ask), assistant(_answer(rng, code, notes, "sql"))])


def reading(rng: Random) -> Chat:
    start, step, count = rng.randint(0, 20), rng.randint(1, 6), rng.randint(3, 5)
    stop = start + step * count - rng.randint(0, step - 1)
    add, var = rng.randint(0, 5), rng.choice(("x", "i", "k", "value", "step"))
    shown = f"{var} + {add}" if add else var
    code = f"for {var} in range({start}, {stop}, {step}):\n    print({shown})"
    ask = rng.choice(("What does this code print?", "Please explain what this prints:",
                      "Which numbers does this loop show?"))
    taken = list(range(start, stop, step))
    answer = " ".join((
        rng.choice((f"The loop starts at {start} and adds {step} each time, while {var} is below {stop}.",
                    f"`range({start}, {stop}, {step})` counts from {start} in steps of {step} and stops before "
                    f"{stop}.")),
        f"So {var} takes the values {listing([str(v) for v in taken])}.",
        f"With {add} added, it prints "
        f"{listing([str(v + add) for v in taken])}." if add else "It prints exactly these numbers.",
    ))
    return Chat([user(f"{ask}\n\n```python\n{code}\n```"), assistant(answer)])

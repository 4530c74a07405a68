"""The `math` family: small sums and word problems, always with the working written out.

A model of this size cannot add two three-digit numbers in one token, but it can copy, split a number into tens and
ones, and look up a product of small factors; every solution is a chain of such steps. Phrasing varies around the chain,
the chain itself is forced, so these answers are the most predictable of the four categories.
"""

from __future__ import annotations

from random import Random

from benchmarks.quickstart.corpus.conversation import Chat, assistant, user
from benchmarks.quickstart.corpus.words import GOODS, NAMES, WEEKDAYS, two

OPENINGS = ("Let us work it out step by step.", "Step by step:", "Here is the working.", "Sure, we can split this up.")
ENDINGS = ("So the answer is {x}.", "The answer is {x}.", "That makes {x}.", "Answer: {x}.")


def _solution(rng: Random, steps: list[str], answer: str, ending: str | None = None) -> str:
    head = [rng.choice(OPENINGS)] if rng.random() < 0.7 else []
    return "\n".join((*head, *steps, ending or rng.choice(ENDINGS).format(x=answer)))


def _add_steps(a: int, b: int) -> list[str]:
    """`47 + 38` as tens, ones and their sum."""
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return [f"Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}", f"Ones: {a % 10} + {b % 10} = {ones}",
            f"Sum: {tens} + {ones} = {tens + ones}"]


def _times_steps(a: int, k: int) -> list[str]:
    """`23 * 4` as `20 * 4`, `3 * 4` and their sum; one line when a has one digit."""
    if a < 10:
        return [f"{a} * {k} = {a * k}"]
    tens = a // 10 * 10
    return [f"{tens} * {k} = {tens * k}", f"{a % 10} * {k} = {a % 10 * k}", f"{tens * k} + {a % 10 * k} = {a * k}"]


def addition(rng: Random) -> Chat:
    a, b, name = rng.randint(11, 99), rng.randint(11, 99), rng.choice(NAMES)
    ask = rng.choice((f"What is {a} + {b}? Please show the working to {name}.",
                      f"{name} wants to add {a} and {b}. How does it go?",
                      f"Please compute {a} plus {b} for {name} and show each step."))
    messages = [user(ask), assistant(_solution(rng, _add_steps(a, b), str(a + b)))]
    if rng.random() < 0.4:
        c = rng.randint(11, 60)
        messages += [user(rng.choice((f"And if {name} adds {c} more?", f"Now add {c} to that for {name}, please."))),
                     assistant(_solution(rng, _add_steps(a + b, c), str(a + b + c)))]
    return Chat(messages)


def product(rng: Random) -> Chat:
    a, k, name = rng.randint(11, 59), rng.randint(2, 9), rng.choice(NAMES)
    thing = rng.choice(GOODS)
    ask = rng.choice((
        f"{name} packs {k} boxes with {a} {thing} each. How many {thing} are there?",
        f"There are {k} shelves and each holds {a} {thing}. How many {thing} does {name} count?",
        f"What is {a} times {k}? {name} needs it to count {thing}.",
    ))
    ending = rng.choice((f"There are {a * k} {thing}.", f"So {name} has {a * k} {thing}.",
                         f"The answer is {a * k} {thing}."))
    return Chat([user(ask), assistant(_solution(rng, [f"{a} * {k}:", *_times_steps(a, k)], "", ending))])


def shopping(rng: Random) -> Chat:
    name, (first, second) = rng.choice(NAMES), two(rng, GOODS)
    n, p, m, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    total = n * p + m * q
    paid = rng.choice([v for v in (50, 100, 200) if v >= total])
    change = rng.random() < 0.5
    story = rng.choice((
        f"{name} buys {n} {first} at {p} euros each and {m} {second} at {q} euros each.",
        f"In a shop, {first} cost {p} euros and {second} cost {q} euros. {name} takes {n} {first} and {m} {second}.",
    ))
    question = f" {name} pays with {paid} euros. What is the change?" if change else rng.choice((" What is the total?",
                                                                                                 " How much is that?"))
    steps = [f"{first.capitalize()}: {n} * {p} = {n * p} euros", f"{second.capitalize()}: {m} * {q} = {m * q} euros",
             f"Total: {n * p} + {m * q} = {total} euros"]
    if change:
        steps.append(f"Change: {paid} - {total} = {paid - total} euros")
        ending = rng.choice((f"{name} gets {paid - total} euros back.", f"The change is {paid - total} euros."))
    else:
        ending = rng.choice((f"{name} pays {total} euros.", f"The total is {total} euros."))
    return Chat([user(story + question), assistant(_solution(rng, steps, "", ending))])


def speed(rng: Random) -> Chat:
    name, hours, pace = rng.choice(NAMES), rng.randint(2, 8), rng.choice((4, 5, 12, 15, 20, 30, 40, 50, 60, 70, 80, 90))
    how = "walks" if pace < 10 else "cycles" if pace <= 20 else "drives"
    day, way = rng.choice(WEEKDAYS), hours * pace
    if rng.random() < 0.5:
        ask = f"On {day} {name} {how} for {hours} hours at {pace} kilometres per hour. How far is that?"
        steps = ["Distance = speed * time", f"{pace} * {hours} = {way}"]
        ending = rng.choice((f"{name} covers {way} kilometres.", f"The distance is {way} kilometres."))
    else:
        ask = f"On {day} {name} {how} {way} kilometres at {pace} kilometres per hour. How long does it take?"
        steps = ["Time = distance / speed", f"{way} / {pace} = {hours}"]
        ending = rng.choice((f"It takes {name} {hours} hours.", f"The trip takes {hours} hours."))
    return Chat([user(ask), assistant(_solution(rng, steps, "", ending))])


def sharing(rng: Random) -> Chat:
    name, thing, k, each, rest = rng.choice(NAMES), rng.choice(GOODS), rng.randint(2, 9), rng.randint(2, 12), 0
    rest = rng.randint(1, k - 1) if rng.random() < 0.5 else 0
    total = k * each + rest
    ask = rng.choice((f"{name} shares {total} {thing} equally among {k} friends. How many does each friend get?",
                      f"{k} children split {total} {thing} that {name} brought. "
                      f"What does each child get, and what is left over?"))
    steps = [f"{each} * {k} = {each * k}", f"{total} - {each * k} = {rest}"]
    left = "nothing is left over" if rest == 0 else f"{rest} left over"
    ending = rng.choice((f"Each one gets {each} {thing}, with "
                         f"{left}." if rest else f"Each one gets {each} {thing}, and {left}.",
                         f"That is {each} {thing} each; {left}."))
    return Chat([user(ask), assistant(_solution(rng, steps, "", ending))])


def discount(rng: Random) -> Chat:
    name, percent, price = rng.choice(NAMES), rng.choice((10, 20, 30, 40, 50)), rng.randint(2, 20) * 10
    what = rng.choice(("coat", "lamp", "chair", "watch", "bag", "tent", "desk", "bicycle"))
    off = price * percent // 100
    ask = rng.choice((f"A {what} costs {price} euros. {name} gets {percent} percent off. What does {name} pay?",
                      f"{name} sees a {what} for {price} euros with a discount of {percent} percent. "
                      f"What is the new price?"))
    steps = [f"10 percent of {price} is {price // 10}", f"{percent} percent is {price // 10} * {percent // 10} = {off}",
             f"{price} - {off} = {price - off}"]
    ending = rng.choice((f"{name} pays {price - off} euros.", f"The {what} costs {price - off} euros now."))
    return Chat([user(ask), assistant(_solution(rng, steps, "", ending))])


def ordering(rng: Random) -> Chat:
    count, name = rng.randint(4, 6), rng.choice(NAMES)
    numbers = rng.sample(range(2, 99), count)
    up = rng.random() < 0.5
    ask = rng.choice((f"Sort these numbers for {name} from {'smallest to largest' if up else 'largest to smallest'}: ",
                      f"{name} needs this list in {'ascending' if up else 'descending'} order: "))
    done = sorted(numbers, reverse=not up)
    answer = "\n".join((
        rng.choice(("Here is the sorted list:", f"In order, {name}:", "Sorted:")), ", ".join(map(str, done)),
        rng.choice((f"The smallest is {min(numbers)} and the largest is {max(numbers)}.",
                    f"There are {count} numbers in total.")),
    ))
    return Chat([user(ask + ", ".join(map(str, numbers)) + "."), assistant(answer)])


def sequence(rng: Random) -> Chat:
    start, step, name = rng.randint(1, 40), rng.randint(2, 12), rng.choice(NAMES)
    terms = [start + step * i for i in range(6)]
    ask = rng.choice((f"{name} writes the sequence {', '.join(map(str, terms[:4]))}. What are the next two numbers?",
                      f"Which two numbers continue {', '.join(map(str, terms[:4]))}? {name} is stuck."))
    steps = [f"{terms[1]} - {terms[0]} = {step}, so each step adds {step}.", f"{terms[3]} + {step} = {terms[4]}",
             f"{terms[4]} + {step} = {terms[5]}"]
    ending = rng.choice((f"The next two numbers are {terms[4]} and {terms[5]}.",
                         f"It goes on with {terms[4]} and {terms[5]}."))
    return Chat([user(ask), assistant(_solution(rng, steps, "", ending))])

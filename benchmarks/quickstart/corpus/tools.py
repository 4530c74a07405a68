"""The `tools` family: tool calls and the answers after them, JSON extraction, and tables.

A tool conversation offers one to three tools; the target picks the right one, fills its arguments from the prompt,
and, once the result has come, reports it in a sentence. Sometimes an argument is missing and the target asks for it
instead of inventing it, so that the choice between text and call depends on reading. Extraction and tables are the
same skill with the format stated in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from benchmarks.quickstart.corpus.conversation import Chat, assistant, tool_call, tool_result, user
from benchmarks.quickstart.corpus.words import (
    CITIES,
    COLOURS,
    GOODS,
    MONTHS,
    NAMES,
    STREETS,
    SURNAMES,
    WEEKDAYS,
    clock,
    listing,
    two,
)

Schema = dict[str, Any]


def _schema(name: str, description: str, **parameters: str) -> Schema:
    """An OpenAI function schema; every parameter is required. `parameters` maps a name to its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    function = {"name": name, "description": description,
                "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}
    return {"type": "function", "function": function}


SCHEMAS = {
    "get_weather": _schema("get_weather", "Weather forecast for a city and day.", city="string", day="string"),
    "convert_currency": _schema("convert_currency", "Convert an amount of money.", amount="integer", source="string",
                                target="string"),
    "search_flights": _schema("search_flights", "Find flights.", origin="string", destination="string", day="string"),
    "create_event": _schema("create_event", "Add an event to the calendar.", title="string", day="string",
                            time="string"),
    "send_message": _schema("send_message", "Send a text message.", recipient="string", text="string"),
    "find_restaurant": _schema("find_restaurant", "Find a restaurant.", city="string", cuisine="string",
                               people="integer"),
    "get_stock": _schema("get_stock", "Number of items in stock.", item="string", colour="string"),
}
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "SEK")
CUISINES = ("Italian", "Indian", "Greek", "Japanese", "Mexican", "Turkish", "Thai", "French")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
TITLES = ("dentist", "team meeting", "piano lesson", "lunch", "yoga class", "book club", "interview", "birthday party")
TEXTS = ("I will be late", "dinner is ready", "the train is delayed", "I found your keys", "the meeting is over",
         "please call me back")
HOUSES = ("Casa Luna", "The Green Table", "Blue Door", "Old Mill", "Little Spoon", "Golden Fork")

Step = tuple[str, dict[str, Any], dict[str, Any], str]  # question, arguments, result, answer


def _weather(rng: Random) -> Step:
    city, day, sky, degrees = rng.choice(CITIES), rng.choice(WEEKDAYS), rng.choice(SKIES), rng.randint(-5, 33)
    ask = rng.choice((f"What will the weather be like in {city} on {day}?",
                      f"Do I need an umbrella in {city} this {day}?",
                      f"I am in {city} on {day}. How warm will it be?"))
    tail = {"rainy": "Take an umbrella.", "snowy": "Dress warmly.", "sunny": "Do not forget your sunglasses.",
            "windy": "A jacket is a good idea.",
            "foggy": "Drive carefully.", "cloudy": "You will not need an umbrella."}[sky]
    say = rng.choice((f"On {day} it will be {sky} in {city} with {degrees} degrees. {tail}",
                      f"Expect {sky} weather and {degrees} degrees in {city} on {day}. {tail}",
                      f"The forecast for {city} on {day} is {sky}, {degrees} degrees."))
    return ask, {"city": city, "day": day}, {"sky": sky, "degrees": degrees}, say


def _currency(rng: Random) -> Step:
    (source, target), amount, result = two(rng, CURRENCIES), rng.randint(2, 95) * 10, rng.randint(11, 999)
    ask = rng.choice((f"How much is {amount} {source} in {target}?", f"Please convert {amount} {source} to {target}.",
                      f"I have {amount} {source}. What is that in {target}?"))
    say = rng.choice((f"{amount} {source} are {result} {target}.", f"For {amount} {source} you get {result} {target}.",
                      f"That is {result} {target} at the current rate."))
    return ask, {"amount": amount, "source": source, "target": target}, {"result": result}, say


def _flights(rng: Random) -> Step:
    (origin, destination), day = two(rng, CITIES), f"{rng.choice(MONTHS)} {rng.randint(1, 28)}"
    time, price = clock(rng), rng.randint(49, 480)
    ask = rng.choice((f"Find me a flight from {origin} to {destination} on {day}.",
                      f"I want to fly to {destination} from {origin} on {day}. What is there?",
                      f"Are there flights on {day} from {origin} to {destination}?"))
    say = rng.choice((f"There is a flight from {origin} to {destination} on {day} at {time} for {price} euros.",
                      f"I found a flight at {time} on {day}; it costs {price} euros. Shall I book it?",
                      f"Yes, on {day} you can leave {origin} at {time} and fly to {destination} for {price} "
                      f"euros."))
    return ask, {"origin": origin, "destination": destination, "day": day}, {"time": time, "price": price}, say


def _event(rng: Random) -> Step:
    title, day, time, number = rng.choice(TITLES), rng.choice(WEEKDAYS), clock(rng), rng.randint(100, 999)
    ask = rng.choice((f"Put {title} in my calendar for {day} at {time}.", f"Please schedule {title} on {day}, {time}.",
                      f"I have {title} on {day} at {time}. Can you save it?"))
    say = rng.choice((f"Done. {title.capitalize()} is in your calendar for {day} at {time}.",
                      f"I have added {title} on {day} at {time}. The event number is {number}.",
                      f"Your {title} on {day} at {time} is saved."))
    return ask, {"title": title, "day": day, "time": time}, {"status": "created", "event": number}, say


def _message(rng: Random) -> Step:
    recipient, text, time = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}", rng.choice(TEXTS), clock(rng)
    ask = rng.choice((f"Tell {recipient} that {text}.", f'Send "{text}" to {recipient}.',
                      f"Please write to {recipient}: {text}."))
    say = rng.choice((f"I have sent your message to {recipient} at {time}.",
                      f"Your message to {recipient} is on its way.", f'Done, {recipient} now knows: "{text}".'))
    return ask, {"recipient": recipient, "text": text}, {"status": "sent", "time": time}, say


def _restaurant(rng: Random) -> Step:
    city, cuisine, people = rng.choice(CITIES), rng.choice(CUISINES), rng.randint(2, 9)
    house, stars = rng.choice(HOUSES), rng.randint(3, 5)
    ask = rng.choice((f"We are {people} people and want {cuisine} food in {city}. Where can we go?",
                      f"Find a {cuisine} restaurant in {city} for {people} people.",
                      f"Is there a good {cuisine} place for {people} in {city}?"))
    say = rng.choice((f"{house} in {city} serves {cuisine} food, has {stars} stars and room for {people} people.",
                      f"I suggest {house}, a {cuisine} restaurant in {city} with {stars} stars.",
                      f"Try {house} in {city}. It has {stars} stars."))
    return ask, {"city": city, "cuisine": cuisine, "people": people}, {"name": house, "stars": stars}, say


def _stock(rng: Random) -> Step:
    item, colour, count = rng.choice(GOODS), rng.choice(COLOURS), rng.randint(0, 250)
    ask = rng.choice((f"How many {colour} {item} do we have in stock?",
                      f"Check the stock of {item} in {colour}, please.",
                      f"Are there any {colour} {item} left? {rng.choice(NAMES)} wants some."))
    say = rng.choice((f"There are {count} {colour} {item} in stock.", f"We have {count} {item} in {colour}.",
                      f"The stock shows {count} {colour} {item}."))
    return ask, {"item": item, "colour": colour}, {"count": count}, say


STEPS: Mapping[str, Callable[[Random], Step]] = {
    "get_weather": _weather, "convert_currency": _currency, "search_flights": _flights, "create_event": _event,
    "send_message": _message, "find_restaurant": _restaurant, "get_stock": _stock,
}


def tool_use(rng: Random) -> Chat:
    names = rng.sample(list(SCHEMAS), rng.choice((1, 2, 2, 3)))
    messages = []
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(names)
        ask, arguments, result, say = STEPS[name](rng)
        messages += [user(ask), tool_call(name, arguments), tool_result(name, result), assistant(say)]
    rng.shuffle(names)
    return Chat(messages, [SCHEMAS[name] for name in names])


def missing_argument(rng: Random) -> Chat:
    """The user leaves out one argument; the target asks for it, then calls the tool."""
    city, day, sky, degrees = rng.choice(CITIES), rng.choice(WEEKDAYS), rng.choice(SKIES), rng.randint(-5, 33)
    name = rng.choice(NAMES)
    if rng.random() < 0.5:
        ask, reply, missing = f"What will the weather be like on {day}? {name} asks.", f"In {city}, please.", "city"
    else:
        ask, reply, missing = f"Tell {name} and me what the weather will be in {city}.", f"For {day}.", "day"
    question = rng.choice((f"Which {missing} do you mean?", f"I can look that up. For which {missing}?",
                           f"Sure. Please tell me the {missing}."))
    tools = [SCHEMAS["get_weather"], *([SCHEMAS["create_event"]] if rng.random() < 0.4 else [])]
    messages = [user(ask), assistant(question), user(reply), tool_call("get_weather", {"city": city, "day": day}),
                tool_result("get_weather", {"sky": sky, "degrees": degrees}),
                assistant(f"On {day} it will be {sky} in {city} with {degrees} degrees.")]
    return Chat(messages, tools)


def extraction(rng: Random) -> Chat:
    name, surname, (first, second) = rng.choice(NAMES), rng.choice(SURNAMES), two(rng, GOODS)
    n, m, colour = rng.randint(1, 40), rng.randint(1, 40), rng.choice(COLOURS)
    street, number, city, day = rng.choice(STREETS), rng.randint(1, 99), rng.choice(CITIES), rng.choice(WEEKDAYS)
    pair = rng.random() < 0.5
    items = [{"item": first, "quantity": n, "colour": colour}] + ([{"item": second, "quantity": m}] if pair else [])
    wanted = f"{n} {colour} {first}" + (f" and {m} {second}" if pair else "")
    story = rng.choice((
        f"Hello, this is {name} {surname}. Please send {wanted} to {number} {street} Street in {city} by {day}.",
        f"{name} {surname} from {city}, {number} {street} Street, orders {wanted}. Delivery on {day}.",
        f"I would like {wanted}, delivered on {day} to {number} {street} Street, {city}. Regards, {name} {surname}",
    ))
    ask = rng.choice(("Extract the order as JSON: ", "Turn this order into JSON. ",
                      "Please return the following order as JSON.\n\n"))
    order = {"customer": f"{name} {surname}", "items": items, "address": f"{number} {street} Street", "city": city,
             "day": day}
    return Chat([user(ask + story),
                 assistant(f"```json\n{json.dumps(order, indent=2 if rng.random() < 0.3 else None)}\n```")])


def table(rng: Random) -> Chat:
    people, goods = rng.sample(NAMES, rng.randint(3, 4)), rng.choice(GOODS)
    counts = rng.sample(range(1, 60), len(people))
    facts = listing([f"{p} has {c}" for p, c in zip(people, counts, strict=True)])
    by = rng.choice(("name", "number", "order"))
    how = {"name": "sorted by name", "number": "with the largest number first", "order": "in this order"}[by]
    ask = rng.choice((f"Make a table of {goods}, {how}: {facts}.",
                      f"{facts} {goods}. Please show that as a table, {how}.")).replace("  ", " ")
    rows = list(zip(people, counts, strict=True))
    if by == "name":
        rows.sort()
    elif by == "number":
        rows.sort(key=lambda row: -row[1])
    best = max(rows, key=lambda row: row[1])[0]
    lines = [f"| name | {goods} |", "| --- | --- |", *(f"| {p} | {c} |" for p, c in rows)]
    lead = rng.choice(("Here is the table:", f"The {goods}, {how}:", "Sure:"))
    tail = rng.choice((f"{best} has the most {goods}.", f"The table has {len(rows)} rows."))
    return Chat([user(ask), assistant("\n".join((lead, "", *lines, "", tail)))])

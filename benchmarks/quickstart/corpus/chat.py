"""The `chat` family: small talk, advice, travel plans, letters, rewriting and short explanations.

This family carries the corpus's entropy. An answer is a sequence of slots, and each slot is a uniform choice between
several phrasings of the same thought: once the first two words of a phrasing are out the rest is determined, but
which phrasing comes cannot be known. A drafter therefore sees both kinds of token that real chat has, free and
forced, and sampling at temperature 1 is visibly harder to predict than greedy decoding.

What the user said (name, city, number of days, obstacle) returns in the answer, so that a model which ignores its
prompt scores badly. Some conversations have a second or third turn that refers back to the first.
"""

from __future__ import annotations

from random import Random

from benchmarks.quickstart.corpus.conversation import Chat, assistant, user
from benchmarks.quickstart.corpus.words import (
    CITIES,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    SUBJECTS,
    WEEKDAYS,
    listing,
    two,
)

ACTIVITIES = (
    "baked a loaf of bread", "planted tomatoes", "painted the kitchen", "fixed my old bike", "finished a long novel",
    "went for a swim in the lake", "cooked a big pot of soup", "cleaned out the garage", "started a pottery class",
    "watched the sunrise", "repaired a wooden chair", "played chess in the park", "built a small bookshelf",
    "took photos of the old town", "walked along the river", "learned a new song", "knitted a warm hat",
    "visited the science museum", "picked berries in the forest", "hosted a game night",
)
COMPANY = ("on my own", "with my sister", "with my brother", "with two friends", "with my neighbour",
           "with my daughter", "with a colleague", "with my parents")
MOODS = {
    "proud": ("You have every reason to be proud.", "Being proud of that is well deserved."),
    "tired": ("No wonder you are tired after that.", "Feeling tired is a sign that you gave it your all."),
    "happy": ("It is lovely to hear that you are happy.", "Moments that make you happy are worth keeping."),
    "relaxed": ("Feeling relaxed afterwards is the best part.", "It is good that it left you relaxed."),
    "curious": ("Staying curious is a great habit.", "Being curious is how the best hobbies begin."),
    "a bit lonely": ("Feeling a bit lonely sometimes is very human.", "I am sorry that you felt a bit lonely."),
}

GOALS: dict[str, tuple[str, ...]] = {
    "sleep better": (
        "Go to bed at the same time every night.", "Keep your phone out of the bedroom.",
        "Avoid coffee after lunch.", "Keep the room cool and dark.", "Read a few pages before you turn off the light.",
        "Take a short walk in the evening."),
    "run ten kilometres": (
        "Start with three short runs a week.", "Alternate between running and walking at first.",
        "Add one kilometre every week.", "Warm up for five minutes before each run.", "Take at least two rest days.",
        "Choose shoes that fit your feet well."),
    "save more money": (
        "Write down everything you spend for a week.", "Set up a transfer on the day you are paid.",
        "Cook at home on weekdays.", "Cancel subscriptions that you do not use.",
        "Wait a day before buying anything big.",
        "Compare prices before you sign a contract."),
    "learn the guitar": (
        "Practise for fifteen minutes a day.", "Begin with three easy chords.", "Play along with songs that you love.",
        "Tune the guitar every time you start.", "Record yourself once a week.", "Go slowly and keep a steady rhythm."),
    "read more books": (
        "Carry a book wherever you go.", "Set aside twenty minutes before bed.", "Join a reading group.",
        "Stop reading books that bore you.", "Keep a list of what to read next.", "Try short stories first."),
    "cook healthier meals": (
        "Plan your meals on Sunday.", "Fill half of the plate with vegetables.", "Use herbs instead of more salt.",
        "Cook a double portion and freeze half.", "Swap white rice for brown rice.", "Keep fruit on the table."),
    "speak in public": (
        "Practise your first sentence by heart.", "Speak more slowly than feels natural.",
        "Look at one friendly face at a time.", "Rehearse in front of a friend.", "Keep a glass of water nearby.",
        "Use short notes instead of a full text."),
    "keep houseplants alive": (
        "Check the soil with your finger before watering.", "Put the pots near a bright window.",
        "Turn each plant once a week.", "Use pots with a hole in the bottom.", "Wipe dust off the leaves.",
        "Start with plants that forgive mistakes."),
    "learn a new language": (
        "Learn ten useful words a day.", "Listen to the radio while you cook.", "Speak aloud from the first day.",
        "Label things in your kitchen.", "Find a partner to talk to.", "Repeat old words every weekend."),
    "be less stressed": (
        "Take three slow breaths when you feel tense.", "Write down what worries you.",
        "Leave your desk for lunch.", "Say no to one thing this week.", "Spend some time outdoors each day.",
        "Turn off notifications in the evening."),
    "write a short story": (
        "Begin with a person who wants something.", "Write a page a day without editing.",
        "Let something go wrong early.", "Read your dialogue aloud.", "Cut the first paragraph when you revise.",
        "Ask a friend what they remember of it."),
    "organise my desk": (
        "Take everything off the desk first.", "Keep only what you use every day.",
        "Put cables in a small box.", "Give each thing a fixed place.", "Clear the desk before you leave.",
        "Sort papers into three piles."),
}
OBSTACLES = {
    "I have very little time": ("Even ten minutes a day will add up.", "Small steps fit into a busy day."),
    "I lose motivation quickly": ("Tell someone about your plan so that you stick to it.",
                                  "A reward at the end of each week keeps you going."),
    "I do not know where to start": ("Pick the first tip and begin tomorrow.", "Start with whatever feels easiest."),
    "I have tried it before and failed": ("This time, aim for progress and not for perfection.",
                                          "An earlier failure simply shows you what to change."),
    "my budget is small": ("None of this costs much.", "You do not need to buy anything to begin."),
    "my days are irregular": ("Tie the habit to a meal so that it moves with your day.",
                              "A flexible plan is better than a strict one."),
}

INTERESTS: dict[str, tuple[str, ...]] = {
    "museums": ("visit the national museum", "see the modern art gallery", "explore the maritime museum",
                "join a guided tour of the city museum"),
    "food": ("taste local cheese at the market", "take a cooking class", "have lunch in a family restaurant",
             "try the street food near the station"),
    "nature": ("walk through the botanical garden", "hike up the nearest hill", "rent a bike and follow the river",
               "have a picnic by the lake"),
    "music": ("hear a concert in the old church", "browse the record shops", "book seats at the opera",
              "find a small jazz club"),
    "history": ("tour the old castle", "walk along the city walls", "visit the cathedral",
                "follow the history trail through the old town"),
    "architecture": ("look at the modern library", "admire the houses on the main square", "climb the bell tower",
                     "cross the famous bridge on foot"),
}

EMAIL_REASONS: dict[str, tuple[str, str]] = {
    "the meeting has to move": ("I need to move our meeting", "Would another time suit you?"),
    "the invoice is still open": ("the invoice we sent you is still open", "Could you please check the payment?"),
    "the delivery arrived damaged": ("our delivery arrived damaged", "Could you send us a replacement?"),
    "I cannot come to the dinner": ("I will not be able to come to the dinner", "Could we meet next week instead?"),
    "the report is ready": ("the report is ready for you", "Please let me know what you think."),
    "I would like a day off": ("I would like to take a day off", "Please tell me whether that is possible."),
    "the heating is broken": ("the heating in our flat is broken", "Could you send someone to repair it?"),
    "I want to thank the team": ("I want to thank you and the whole team", "It was a pleasure to work with you."),
}
REWRITES: dict[str, tuple[str, ...]] = {
    "send me the {thing}": ("Could you please send me the {thing}", "Would you mind sending me the {thing}",
                            "I would be grateful if you could send me the {thing}"),
    "fix the {thing}": ("Could you please fix the {thing}", "Would you be able to repair the {thing}",
                        "I would appreciate it if you could fix the {thing}"),
    "give back my {thing}": ("Could you please return my {thing}", "Would you mind giving back my {thing}",
                             "I would be glad to have my {thing} back"),
    "stop moving the {thing}": ("Could you please leave the {thing} in its place",
                                "Would you mind not moving the {thing}",
                                "I would prefer that the {thing} stays where it is"),
}
THINGS = ("report", "printer", "contract", "ladder", "projector", "budget", "key", "drawing", "schedule", "camera",
          "laptop", "slide", "invoice", "calendar", "umbrella")

CONCEPTS: dict[str, tuple[str, str, str]] = {
    "photosynthesis": ("the way plants turn sunlight, water and air into sugar", "a small kitchen run on light",
                       "It gives us the oxygen that we breathe."),
    "gravity": ("the pull that masses have on each other", "an invisible rubber band between things",
                "It keeps the Moon on its path around the Earth."),
    "inflation": ("a general rise in prices over time", "a ruler that slowly shrinks",
                  "It means that the same money buys a little less each year."),
    "a database": ("an ordered collection of data that a program can search", "a library with a very fast librarian",
                   "It lets many people read and change data safely."),
    "the water cycle": ("the journey of water from sea to sky and back", "a slow fountain as big as the world",
                        "It brings fresh rain to rivers and fields."),
    "a vaccine": ("a way to teach the body about a germ before it meets it", "a fire drill for the immune system",
                  "It helps people to stay healthy."),
    "encryption": ("a method of hiding a message from everyone without the key", "a box with a very good lock",
                   "It protects letters, photos and payments."),
    "evolution": ("the slow change of living things over many generations", "a long game of small improvements",
                  "It explains why there are so many kinds of life."),
    "electricity": ("the flow of tiny charges through a wire", "water that moves through a pipe",
                    "It powers lamps, trains and computers."),
    "compound interest": ("interest that is paid on earlier interest", "a snowball that rolls down a hill",
                          "It rewards those who start early."),
    "a compiler": ("a program that translates source code for the machine",
                   "a careful interpreter between two languages",
                   "It finds many mistakes before the program runs."),
    "the seasons": ("changes of weather caused by the tilt of the Earth", "a lamp that shines on a leaning ball",
                    "They decide when we sow and when we harvest."),
}
AUDIENCES = ("my {n} year old {kin}", "a class of {n} pupils", "my {subject} teacher", "a group of {n} visitors")


def small_talk(rng: Random) -> Chat:
    name, mood = rng.choice(NAMES), rng.choice(list(MOODS))
    did, company, day = rng.choice(ACTIVITIES), rng.choice(COMPANY), rng.choice(WEEKDAYS)
    hello = rng.choice((f"Hi, I am {name}.", f"Hello, {name} here.", f"Hey, my name is {name}.",
                        f"Good morning, this is {name}."))
    ask = rng.choice((
        f"{hello} On {day} I {did} {company} and now I feel {mood}.",
        f"{hello} Last {day} I {did} {company}. It made me feel {mood}.",
        f"{hello} I {did} on {day} {company}, and I was {mood} afterwards.",
    ))
    did_you = did.replace(" my ", " your ")
    company_you = company.replace("my", "your")
    answer = " ".join((
        rng.choice((f"Hello {name}!", f"Nice to meet you, {name}.", f"Hi {name}, thank you for telling me.")),
        rng.choice((f"It sounds wonderful that you {did_you} {company_you}.",
                    f"So you {did_you} {company_you}, what a good idea.",
                    f"I like that you {did_you} {company_you} on {day}.")),
        rng.choice(MOODS[mood]),
        rng.choice(("Will you do it again next week?", "What was the best moment of the day?",
                    "What would you like to try next?",
                    "How long did it take you?")),
    ))
    messages = [user(ask), assistant(answer)]
    if rng.random() < 0.5:
        next_did, month = rng.choice([a for a in ACTIVITIES if a != did]), rng.choice(MONTHS)
        messages.append(user(rng.choice((
            f"Good question. In {month} I also {next_did}. Which of the two should I do again?",
            f"I am not sure. By the way, in {month} I {next_did}. Do you remember my name and what I did on {day}?",
        ))))
        next_you = next_did.replace(" my ", " your ")
        if "remember" in messages[-1]["content"]:
            messages.append(assistant(" ".join((
                rng.choice((f"Of course, you are {name}.", f"Yes, your name is {name}.")),
                f"On {day} you {did_you} {company_you}, and in {month} you {next_you}.",
                rng.choice(("That is quite a list!", "You keep yourself busy.", "I enjoy hearing about it.")),
            ))))
        else:
            first = rng.random() < 0.5
            messages.append(assistant(" ".join((
                rng.choice(("Both sound good.", f"That is a hard choice, {name}.", "I would not want to miss either.")),
                f"When you {did_you if first else next_you}, "
                + rng.choice(("it seems you had the better time.", "you learned something along the way.")),
                rng.choice(("So I would do that again.", "That would be my choice.", "Why not repeat it soon?")),
            ))))
    return Chat(messages)


def advice(rng: Random) -> Chat:
    goal, obstacle = rng.choice(list(GOALS)), rng.choice(list(OBSTACLES))
    weeks, name = rng.randint(2, 12), rng.choice(NAMES)
    count = rng.choice((3, 3, 4))
    ask = rng.choice((
        f"I want to {goal} within {weeks} weeks, but {obstacle}. Can you give me {NUMBER_WORDS[count]} tips? "
        f"Yours, {name}",
        f"My friend {name} and I would like to {goal}. We have {weeks} weeks and {obstacle}. "
        f"Please share {NUMBER_WORDS[count]} tips.",
        f"How can I {goal} in {weeks} weeks? {obstacle[0].upper() + obstacle[1:]}. "
        f"Please give {NUMBER_WORDS[count]} tips for me and {name}.",
    ))
    tips = rng.sample(GOALS[goal], count)
    goal_you = goal.replace(" my ", " your ")
    answer = "\n".join((
        rng.choice((f"Here are {NUMBER_WORDS[count]} tips to help you {goal_you}:",
                    f"Good plan! To {goal_you} in {weeks} weeks, try this:",
                    f"You can {goal_you}, {name}. These steps help:", "Gladly. This is what I would do:")),
        *(f"{i}. {tip}" for i, tip in enumerate(tips, 1)),
        rng.choice(OBSTACLES[obstacle]) + " " + rng.choice((
            f"In {weeks} weeks you will see a difference.", "Good luck!", "Let me know how it goes.",
            f"I am sure you can do it, {name}.")),
    ))
    messages = [user(ask), assistant(answer)]
    if rng.random() < 0.4:
        which = rng.randint(1, count)
        messages += [
            user(rng.choice((f"Thanks! Why is tip number {which} useful, and when should I start, "
                             f"{rng.choice(WEEKDAYS)}?",
                             f"Which day is best to begin with tip {which}? I thought of {rng.choice(WEEKDAYS)}."))),
        ]
        day = next(d for d in WEEKDAYS if d in messages[-1]["content"])
        tip = tips[which - 1]
        messages.append(assistant(" ".join((
            rng.choice((f"Tip {which} says: {tip}", f"You mean this one: {tip}")),
            rng.choice(("It is useful because it makes the next step easier.",
                        "It works because it is simple to repeat.",
                        "It helps because you notice the effect at once.")),
            rng.choice((f"Starting on {day} is a good idea.", f"{day} is as good as any other day.",
                        f"Yes, begin on {day}.")),
        ))))
    return Chat(messages)


def travel(rng: Random) -> Chat:
    city, days, month = rng.choice(CITIES), rng.randint(2, 4), rng.choice(MONTHS)
    likes = two(rng, list(INTERESTS))
    who = rng.choice(("alone", f"with {rng.choice(NAMES)}", f"with {listing(two(rng, NAMES))}", "with my family"))
    ask = rng.choice((
        f"I am going to {city} for {days} days in {month}, travelling {who}. I like {likes[0]} and {likes[1]}. "
        f"What should I do?",
        f"Please plan {days} days in {city} for {month}. I travel {who} and enjoy {likes[0]} and {likes[1]}.",
        f"Can you suggest a {days} day plan for {city}? "
        f"It is for {month}, {who}, and the focus is on {likes[0]} and {likes[1]}.",
    ))
    plan = [(rng.choice(INTERESTS[likes[0]]), rng.choice(INTERESTS[likes[1]])) for _ in range(days)]
    lines = [f"Day {i}: {rng.choice(('In the morning', 'First'))}, {a}. {rng.choice(('Later', 'After lunch'))}, {b}."
             for i, (a, b) in enumerate(plan, 1)]
    answer = "\n".join((
        rng.choice((f"{city} is lovely in {month}. Here is a plan for {days} days:",
                    f"Here is a {days} day plan for {city}:",
                    f"With {likes[0]} and {likes[1]} in mind, I suggest this for {city}:")),
        *lines,
        rng.choice((f"Enjoy {city}!", f"Pack for the weather in {month}.", "Book the popular places early.",
                    "Have a good trip!")),
    ))
    messages = [user(ask), assistant(answer)]
    if rng.random() < 0.35:
        day, mate = rng.randint(1, days), rng.choice(NAMES)
        messages += [
            user(f"{rng.choice(('Great.', 'Lovely.', 'Thank you.'))} What was the plan for day {day} in {city} again? "
                 f"I want to tell {mate}."),
            assistant(f"{rng.choice(('On', 'For'))} day {day} in {city}: "
                      f"{plan[day - 1][0]}, and later {plan[day - 1][1]}. "
                      + rng.choice((f"I hope {mate} likes it.", f"Greetings to {mate}!",
                                    f"Tell {mate} to bring good shoes."))),
        ]
    return Chat(messages)


def email(rng: Random) -> Chat:
    sender, recipient = two(rng, NAMES)
    reason, day = rng.choice(list(EMAIL_REASONS)), rng.choice(WEEKDAYS)
    tone = rng.choice(("formal", "friendly", "short"))
    ask = rng.choice((
        f"Write a {tone} email from {sender} to {recipient}. The reason: {reason}. Mention {day}.",
        f"Please draft a {tone} email to {recipient} and sign it as {sender}. "
        f"It should say that {reason} and mention {day}.",
        f"I am {sender}. Help me write a {tone} email telling {recipient} that {reason}. It concerns {day}.",
    ))
    opening, closing = EMAIL_REASONS[reason]
    greeting = {"formal": f"Dear {recipient},", "friendly": f"Hi {recipient},", "short": f"Hello {recipient},"}[tone]
    why = {"formal": ("I am writing to let you know that", "I would like to inform you that"),
           "friendly": ("I hope you are well. I wanted to tell you that", "just a quick note to say that"),
           "short": ("please note that", "in short,")}[tone]
    bye = {"formal": ("Kind regards,", "Yours sincerely,"), "friendly": ("All the best,", "See you soon,"),
           "short": ("Thanks,", "Best,")}
    when = rng.choice((f"This is about {day}.", f"It concerns {day}.", f"I am free to talk on {day}."))
    lines = [f"Subject: {rng.choice(('About', 'Regarding'))} {day}", "", greeting, "",
             f"{rng.choice(why)} {opening}. {when} {closing}",
             "", rng.choice(bye[tone]), sender]
    lead = [] if tone == "short" else [rng.choice(("Here is a draft:", f"This {tone} email should work:")), ""]
    return Chat([user(ask), assistant("\n".join((*lead, *lines)))])


def rewrite(rng: Random) -> Chat:
    pattern, thing = rng.choice(list(REWRITES)), rng.choice(THINGS)
    day, name = rng.choice(WEEKDAYS), rng.choice(NAMES)
    blunt = f"{name}, {pattern.format(thing=thing)} before {day}."
    ask = rng.choice((f'Make this more polite: "{blunt}"', f'Rewrite this sentence politely: "{blunt}"',
                      f'How do I say this in a nicer way? "{blunt}"'))
    options = [o.format(thing=thing) for o in rng.sample(REWRITES[pattern], 2)]
    first, second = (f"Dear {name}, {o} before {day}." if o.startswith("I ")
                     else f"Dear {name}, {o[0].lower()}{o[1:]} before {day}?" for o in options)
    answer = "\n".join((
        rng.choice(("Here are two polite versions:", "You could write:", "Either of these sounds kinder:")),
        f"- {first}", f"- {second}",
        rng.choice(("The first one is a little warmer.", "Both keep the deadline.",
                    f"I think {name} will prefer the second one.")),
    ))
    return Chat([user(ask), assistant(answer)])


def explain(rng: Random) -> Chat:
    concept, name = rng.choice(list(CONCEPTS)), rng.choice(NAMES)
    audience = rng.choice(AUDIENCES).format(n=rng.randint(6, 30), kin=rng.choice(("nephew", "niece", "cousin")),
                                            subject=rng.choice(SUBJECTS))
    count = rng.choice((2, 3))
    ask = rng.choice((
        f"Explain {concept} to {audience} in {NUMBER_WORDS[count]} sentences. The name is {name}.",
        f"What is {concept}? I need {NUMBER_WORDS[count]} sentences for {audience}, and {name} will read them aloud.",
        f"{name} asks what {concept} is. Please answer for {audience} in {NUMBER_WORDS[count]} sentences.",
    ))
    meaning, image, use = CONCEPTS[concept]
    head = concept[0].upper() + concept[1:]
    verb = "are" if concept == "the seasons" else "is"
    sentences = [rng.choice((f"{head} {verb} {meaning}.", f"{name}, {concept} {verb} {meaning}.")),
                 rng.choice((f"Think of {image}.", f"You can picture {image}.", f"It is a little like {image}.")),
                 use]
    return Chat([user(ask), assistant(" ".join([*sentences[:1], use] if count == 2 else sentences))])

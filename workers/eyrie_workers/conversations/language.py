"""A guess at the language of a text, for the language counts of a report.

By script where a script belongs to one language or is named as a script, by the most common words where many languages
share the Latin alphabet. Short texts, mixed texts and languages not listed are `other`; code is classified by its
comments and keywords. Nothing is filtered by this.
"""

from collections import Counter

# First and last code point of a script, and the name reported for it.
_SCRIPTS = (
    (0x0370, 0x03FF, "greek"), (0x0400, 0x052F, "cyrillic"), (0x0590, 0x05FF, "hebrew"), (0x0600, 0x06FF, "arabic"),
    (0x0900, 0x097F, "devanagari"), (0x0E00, 0x0E7F, "thai"), (0x3040, 0x30FF, "japanese"), (0x3400, 0x9FFF, "chinese"),
    (0xAC00, 0xD7AF, "korean"),
)
_COMMON_WORDS = {
    "english": "the and of to is in that what how you for with are this it can please write an",
    "german": "der die das und ist nicht ein eine ich mit auf wie was bitte zu den von sie es",
    "french": "le la les et est une des que pour dans qui je vous pas sur un du comment quelle",
    "spanish": "el los las y es una que para en por como con un del qu\u00e9 c\u00f3mo se mi lo",
    "italian": "il gli e che di una per non sono con come del della un cosa mi pi\u00f9 \u00e8",
    "portuguese": "os as e \u00e9 uma que para n\u00e3o com como do da um em por se voc\u00ea mais",
    "dutch": "de het een en van is niet dat ik met voor op hoe wat te zijn je aan",
}
_WORDS = {language: frozenset(words.split()) for language, words in _COMMON_WORDS.items()}
_MAX_CHARACTERS = 4000


def guess(text: str) -> str:
    """A language, a script, or `other`."""
    text = text[:_MAX_CHARACTERS].lower()
    letters = [c for c in text if c.isalpha()]
    scripts = Counter(_script(ord(c)) for c in letters)
    if scripts["japanese"] and scripts["japanese"] * 10 >= scripts["chinese"]:
        scripts["japanese"] += scripts.pop("chinese", 0)  # Japanese text uses both scripts
    script, count = scripts.most_common(1)[0] if scripts else ("latin", 0)
    if script != "latin" and count * 2 > len(letters):
        return script
    words = Counter("".join(c if c.isalpha() else " " for c in text).split())
    marks = {language: sum(words[word] for word in known) for language, known in _WORDS.items()}
    best = max(marks, key=lambda language: marks[language])
    alone = sum(mark == marks[best] for mark in marks.values()) == 1
    return best if marks[best] and alone else "other"


def _script(point: int) -> str:
    return next((name for low, high, name in _SCRIPTS if low <= point <= high), "latin")

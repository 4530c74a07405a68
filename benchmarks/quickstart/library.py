"""Conversations built from the Python distribution: docstrings, code and the language reference.

The templated corpus is easy: after two words of a phrasing the rest is determined, and drafters of all families do well
on it. This text was written by many authors over thirty years: its names, prose and code cannot be predicted from the
question. It needs no network and is not shipped: it is read from the running interpreter, so the same seed gives the
same conversations on the same Python version, which the card of a target trained on it records.

Families: purpose (a docstring), reading (code to docstring), writing (docstring to code), completing (code), module,
topic (of the language reference). A third of the stream is the templated corpus, so that the shipped suites and tool
calls stay within what the target has seen.

The rule of `corpus` holds here too: a user message whose normalised text hashes to 0 modulo 64 is held out.

    python -m benchmarks.quickstart.library --num 800 --seed 7 --out chats.jsonl
    python -m benchmarks.quickstart.library --num 24 --held-out --out suite.jsonl
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from sysconfig import get_path

from benchmarks.quickstart.corpus.conversation import Chat, assistant, user
from benchmarks.quickstart.corpus.streams import (
    Conversation,
    is_held_out,
    training_stream,
    user_prompts,
    write_jsonl,
)

TEMPLATED_SHARE = 1 / 3
LONGEST = 1000
"""Characters of an answer, and of code in a question: with both, a conversation mostly stays below 512 tokens."""

_SHORTEST = 40
# Tests, data tables, and modules for other interpreters.
_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings",
                       "pydoc_data", "ensurepip", "turtledemo", "__pycache__"})


@dataclass(frozen=True)
class Item:
    """One documented function or class."""

    module: str
    name: str
    doc: str
    head: str
    """Its first line or lines, up to the colon."""

    body: str
    """The definition after its docstring."""

    @property
    def code(self) -> str:
        """The definition without its docstring."""
        return f"{self.head}\n{self.body}"


class Shelf:
    """The documented definitions below one directory of Python modules, ordered by name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def modules(self) -> tuple[tuple[str, str, tuple[Item, ...]], ...]:
        """Name, docstring and documented items of every module."""
        found = []
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            if _LEFT_OUT.intersection(parts):
                continue
            try:
                source = path.read_text(encoding="utf-8")
                tree = ast.parse(source)
            except (SyntaxError, UnicodeDecodeError, OSError):
                continue
            name = ".".join(part for part in parts if part != "__init__")
            found.append((name, _plain(ast.get_docstring(tree)), tuple(_items(name, tree, source.splitlines()))))
        return tuple(found)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All documented functions and classes."""
        return tuple(item for _, _, found in self.modules for item in found)

    @cached_property
    def short_items(self) -> tuple[Item, ...]:
        """Those whose code fits into a conversation and has something to complete."""
        return tuple(item for item in self.items
                     if _SHORTEST < len(item.code) <= LONGEST and item.body.count("\n") > 1)

    @cached_property
    def documented_modules(self) -> tuple[tuple[str, str], ...]:
        """Modules with a docstring of sufficient length."""
        return tuple((name, doc) for name, doc, _ in self.modules if len(doc) >= _SHORTEST)

    @cached_property
    def chapters(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Topics of the language reference and their paragraphs; the same for every directory."""
        cut = ((name, tuple(p.strip("\n") for p in text.split("\n\n") if p.strip() and p.isascii()))
               for name, text in sorted(topics.items()))
        return tuple((name, paragraphs) for name, paragraphs in cut if len(paragraphs) > 1)


@cache
def python_library() -> Shelf:
    """The standard library of the running interpreter. Reading it takes some seconds, once."""
    return Shelf(Path(get_path("stdlib")))


def _items(module: str, tree: ast.Module, lines: list[str]) -> Iterator[Item]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        doc = _plain(ast.get_docstring(node))
        if len(doc) < _SHORTEST or len(node.body) < 2:
            continue
        first, after = node.body[0], node.body[1]
        head = textwrap.dedent("\n".join(lines[node.lineno - 1:first.lineno - 1]))
        begin = min([after.lineno, *(d.lineno for d in getattr(after, "decorator_list", []))]) - 1
        body = textwrap.indent(textwrap.dedent("\n".join(lines[begin:node.end_lineno])), "    ")
        if head.isascii() and body.isascii():
            yield Item(module, node.name, doc, head, body)


def _plain(doc: str | None) -> str:
    return doc if doc and doc.isascii() else ""


def beginning(text: str, most: int = LONGEST) -> str:
    """As many whole lines as fit; at least the beginning of the first."""
    kept: list[str] = []
    for line in text.splitlines():
        if sum(map(len, kept)) + len(kept) + len(line) > most:
            break
        kept.append(line)
    return "\n".join(kept).rstrip() or text[:most]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def purpose(rng: Random, shelf: Shelf) -> Chat:
    item = rng.choice(shelf.items)
    asked = rng.choice(("What does {n} in {m} do?", "What is {n} from the {m} module for?", "Explain {m}.{n}.",
                        "Tell me about {n} ({m}).", "How is {n} of {m} documented?"))
    return Chat([user(asked.format(n=item.name, m=item.module)), assistant(beginning(item.doc))])


def reading(rng: Random, shelf: Shelf) -> Chat:
    item = rng.choice(shelf.short_items)
    asked = rng.choice(("What does this code do?", "Explain this:", "Write a docstring for this.", "What is this for?"))
    return Chat([user(f"{asked}\n{fenced(item.code)}"), assistant(beginning(item.doc, LONGEST // 2))])


def writing(rng: Random, shelf: Shelf) -> Chat:
    item = rng.choice(shelf.short_items)
    wanted = beginning(item.doc, LONGEST // 2)
    asked = rng.choice(("Write {n} for a module like {m}:", "Please write {n} ({m}):", "I need {n} for {m}:"))
    return Chat([user(f"{asked.format(n=item.name, m=item.module)}\n{wanted}"), assistant(fenced(item.code))])


def completing(rng: Random, shelf: Shelf) -> Chat:
    item = rng.choice(shelf.short_items)
    lines = item.body.splitlines()
    at = rng.randint(1, len(lines) - 1)
    begun = "\n".join([item.head, *lines[:at]])
    return Chat([user(f"{rng.choice(('Complete this:', 'Go on:', 'What comes next?'))}\n{fenced(begun)}"),
                 assistant(fenced("\n".join(lines[at:])))])


def module(rng: Random, shelf: Shelf) -> Chat:
    name, doc = rng.choice(shelf.documented_modules)
    asked = rng.choice(("What is the module {n} for?", "Describe {n}.", "What can I do with {n}?"))
    return Chat([user(asked.format(n=name)), assistant(beginning(doc))])


def topic(rng: Random, shelf: Shelf) -> Chat:
    name, paragraphs = rng.choice(shelf.chapters)
    at = rng.randrange(len(paragraphs) - 1)
    asked = rng.choice(("From the chapter on {n}, go on after this:", "What follows, in {n}?", "Continue ({n}):"))
    return Chat([user(f"{asked.format(n=name)}\n{beginning(paragraphs[at], LONGEST // 2)}"),
                 assistant(beginning(paragraphs[at + 1]))])


FAMILIES: tuple[tuple[Callable[[Random, Shelf], Chat], int], ...] = (
    (purpose, 4), (reading, 3), (writing, 3), (completing, 3), (module, 1), (topic, 3))


def _stream(seed: int, shelf: Shelf | None, wanted: Callable[[Conversation], bool]) -> Iterator[Conversation]:
    makers, weights = zip(*FAMILIES, strict=True)
    shelf = shelf or python_library()
    index = 0
    while True:
        rng = Random(f"library:{seed}:{index}")
        while True:
            maker = rng.choices(makers, weights)[0]
            found = Conversation("library", maker.__name__, maker(rng, shelf))
            if wanted(found):
                break
        yield found
        index += 1


def library_stream(seed: int, shelf: Shelf | None = None) -> Iterator[Conversation]:
    """Endless conversations from Python's library or another shelf, none held out."""
    return _stream(seed, shelf, lambda c: not any(map(is_held_out, user_prompts(c.chat.messages))))


def library_held_out(seed: int, shelf: Shelf | None = None) -> Iterator[Conversation]:
    """Endless held-out conversations from the library."""
    return _stream(seed, shelf, lambda c: is_held_out(user_prompts(c.chat.messages)[-1]))


def mixed_stream(seed: int) -> Iterator[Conversation]:
    """What the larger target is trained on: the library, and a third of templates."""
    rng, templates, library = Random(f"mixed:{seed}"), training_stream(seed), library_stream(seed)
    while True:
        yield next(templates if rng.random() < TEMPLATED_SHARE else library)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write conversations made from Python's own library as JSONL.")
    parser.add_argument("--num", type=int, required=True, help="conversations to write")
    parser.add_argument("--seed", type=int, default=7, help="stream; the larger target is trained on stream 0")
    parser.add_argument("--held-out", action="store_true", help="prompts for a suite: the library's held-out ones")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    rows = (library_held_out if args.held_out else mixed_stream)(args.seed)
    made = (c.row() for c in islice(rows, args.num))
    # A suite's row ends with the question.
    write_jsonl(({**row, "messages": row["messages"][:-1]} for row in made) if args.held_out else made, args.out)


if __name__ == "__main__":
    main()

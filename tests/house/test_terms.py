"""Terms that were replaced by those of PyTorch, SGLang and Kubernetes: none returns as a public name.

Public names are file names, and in the five packages and the benchmarks the names of classes, functions, parameters and
attributes that do not begin with an underscore; further the properties of the OpenAPI document and the commands and
options of `eyrie`. To replace another term, add a line to WORDS or NAMES.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.house.sources import ROOT, benchmarks, dotted, modules, parsed

WORDS = {
    "arm": "variant", "arms": "variants", "asker": "load client", "asking": "generation client",
    "examination": "validation", "leash": "parent death signal", "leashed": "with parent death signal",
    "lesson": "target distribution", "mend": "hint", "mends": "hints", "news": "event batch",
    "nowhere": "unavailable runner", "opinion": "top-k logits", "opinions": "top-k logits",
    "retracing": "round replay", "suspects": "known misconfigurations", "taught": "supervised, distillation objective",
    "tend": "reconcile", "told": "args, stats, message, payload",
}
"""Replaced words: no public name contains one as a part between underscores or capitals."""

NAMES = {
    "Feed": "BatchLoader", "GivenAnswers": "AnswersOfData", "Ground": "SharedProjections",
    "KeptKeys": "DrafterKVCache", "kept_keys": "kv_cache",
    "lay": "measure, build", "lay_ground": "shared_projections", "Lot": "RoutedRequest", "lot": "request",
    "Moment": "StepContext", "Place": "StorageBackend", "Seat": "Subscriber", "seat": "subscriber",
    "TargetEnds": "TargetEmbeddings", "World": "DistContext, Runtime",
}
"""Replaced names: no public name is one of them as a whole."""

FILES = {
    "counted": "engine_metrics", "following": "event_fanout", "foundation": "profile", "given_answers": "answers",
    "guards": "middleware", "left_in_store": "stored_files",
    "outbound": "ssrf_safe_http", "places": "storage_backend", "quiet": "machine_lock", "reach": "spec_policy",
    "standing": "objects", "unchanged": "objects",
}
"""Replaced file names; in other names these words are common."""

CORPUS_FILES = {"calls": "tools", "programs": "code", "sums": "math", "talk": "chat"}
"""Replaced file names of the quickstart's corpus."""

STORED = {("eyrie_workers.hidden_states.shard_format", "taught")}
"""Names that are kept because files on disk hold them: stores written before must stay readable."""


def parts(name: str) -> list[str]:
    """`KeptKeys`, `kept_keys` and `kept-keys` as kept, keys."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, functions, parameters and attributes, and of constants of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            for statement in node.body:
                yield from _assigned(statement)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            if not node.name.startswith("_") or node.name == "__init__":
                arguments = node.args
                yield from (one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for statement in tree.body:
        yield from _assigned(statement)


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else \
        [statement.target] if isinstance(statement, ast.AnnAssign) else []
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def is_replaced(name: str) -> bool:
    return not name.startswith("_") and (name in NAMES or not WORDS.keys().isdisjoint(parts(name)))


def test_a_replaced_term_is_recognised() -> None:
    assert all(map(is_replaced, ("mend", "find_mends", "KeptKeys", "Lesson", "by_arm", "Lot", "lay")))
    assert not any(map(is_replaced, ("hint", "layer", "charm", "alarm", "Slot", "amendment", "_told", "lot_size")))


def test_no_replaced_term_is_a_public_name_of_the_code() -> None:
    found = {(dotted(path), name) for path in (*modules(), *benchmarks()) for name in public_names(parsed(path))
             if is_replaced(name)}
    assert sorted(found - STORED) == []


def test_no_replaced_term_is_a_file_name() -> None:
    corpus = ROOT / "benchmarks/quickstart/corpus"
    assert [path for path in (*modules(), *benchmarks())
            if path.stem in FILES or is_replaced(path.stem) or is_replaced(path.parent.name)] == []
    assert [path for path in corpus.iterdir() if path.stem in CORPUS_FILES] == []


def test_no_replaced_term_is_a_field_or_a_path_of_the_api(tmp_path: Path) -> None:
    document = create_app(Settings(home=tmp_path)).openapi()
    schemas = document["components"]["schemas"]
    names = {*schemas, *(name for schema in schemas.values() for name in schema.get("properties", {})),
             *(part for path in document["paths"] for part in re.findall(r"[\w-]+", path))}
    assert len(names) > 300
    assert sorted(filter(is_replaced, names)) == []


def test_no_replaced_term_is_a_word_of_the_command_line() -> None:
    from eyrie_operator.command import app

    def words(command: click.Command) -> Iterator[str]:
        for parameter in command.params:
            yield from (option.lstrip("-") for option in (parameter.name or "", *parameter.opts))
        for name, inner in getattr(command, "commands", {}).items():
            yield name
            yield from words(inner)

    names = set(words(typer.main.get_command(app)))
    # The program with argparse that `eyrie load-test` starts.
    for path in (*modules(), *benchmarks()):
        names |= {node.value.lstrip("-") for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)
                  and isinstance(node.value, str) and re.fullmatch(r"--[a-z-]+", node.value)}
    assert {"server", "detach", "variant", "rollback"} <= names
    assert sorted(filter(is_replaced, names)) == []

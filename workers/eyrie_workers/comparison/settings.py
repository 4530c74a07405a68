"""The command line of a comparison as a `CompareSpec`: options, defaults, and the short form. Pure.

With the defaults, all families on the shipped target take half an hour on two idle cores. `--short` runs everything in
a few minutes, with too few prompts to decide by.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.benchmark import QUICKSTART_SUITES, SuiteSpec
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.engine import DraftTreeShape, SamplingSpec
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.rules import rule_of
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.comparison.plan import Budget, CompareSpec

QUICKSTART = "quickstart"
_QUICKSTART_DRAFT_VOCABULARY = 1536  # covers 98 % of its answers, as in the demo


class Sizes(NamedTuple):
    """The sizes that `--short` reduces."""

    conversations: int
    budget: str
    batch_tokens: int
    prompts: int
    tokens: int


FULL = Sizes(900, "seconds=100", 1024, 6, 64)
SHORT = Sizes(160, "tokens=40k", 512, 2, 32)


def build_parser(families: Sequence[str]) -> argparse.ArgumentParser:
    """The options. families: those that can be trained."""
    parser = argparse.ArgumentParser(
        prog="eyrie compare",
        description="Train drafters of several families for one target at an equal budget, measure all of them, and "
                    "report which is best for it, if any.",
        epilog="An interrupted comparison resumes when started again with the same options. n-gram lookup and no "
               "drafter are always compared.")
    add = parser.add_argument
    add("--target", default=QUICKSTART, help="Hugging Face directory or Hub id; default: the shipped model")
    add("--dtype", default="float32", help="arithmetic of the target")
    add("--families", default=",".join(families), metavar="NAME,NAME,...", help=f"default: {','.join(families)}")
    add("--rival", action="append", default=[], metavar="PATH",
        help="a drafter to measure with them, untrained here: directory or Hub id; may be repeated")
    add("--budget", metavar="tokens=N|seconds=N",
        help=f"of each family's training: packed tokens (300k, 2m) or seconds; default {FULL.budget}")
    add("--data", action="append", default=[], metavar="PATH",
        help="conversations: JSONL, parquet or Hub id; may be repeated; default for the shipped target: its own")
    add("--conversations", type=int, help=f"drawn from the data; default {FULL.conversations}")
    add("--suites", action="append", default=[], metavar="[NAME=]PATH",
        help="held-out prompts: a file, quickstart:chat (math, code, tools), or held-out (split off the data); may be "
             "repeated; default: the four quickstart suites for the shipped target, held-out for others")
    add("--concurrency", default="1,4", metavar="N,N,...", help="requests decoded at once; ranked at the first")
    add("--temperatures", default="0,1", metavar="T,T,...")
    add("--prompts", type=int, help=f"of each suite, one at a time; default {FULL.prompts}")
    add("--tokens", type=int, help=f"longest measured answer; default {FULL.tokens}")
    add("--tree", default="5/2/10", metavar="STEPS/TOPK/TOKENS",
        help="depth of every variant, width and tokens (root included) of every tree")
    add("--draft-vocab-size", type=int, help="of families that have one; default: the contract's")
    add("--codec", help="how captured states are stored")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of training and measuring; default: all")
    add("--short", action="store_true", help="smaller in everything: runs in minutes, too little data to decide by")
    add("--out", type=Path, required=True, metavar="DIR", help="reports, plots, drafters and intermediate results")
    add("--json", action="store_true", help="the report as JSON on stdout")
    return parser


def read(given: argparse.Namespace) -> CompareSpec:
    """The options as one spec. Raises InvalidInput naming the option."""
    sizes = SHORT if given.short else FULL
    shipped = given.target == QUICKSTART
    if not shipped and not given.data:
        raise InvalidInput(f"--data is required for the target {given.target!r}",
                           "give conversations of its users, JSONL or parquet: --data chats.jsonl")
    families = [name.strip() for name in given.families.split(",") if name.strip()]
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise InvalidInput(f"--families names {', '.join(unknown)}", f"choose from {', '.join(FAMILIES)}")
    vocabulary = given.draft_vocab_size or (_QUICKSTART_DRAFT_VOCABULARY if shipped else None)
    prompts, capture = given.prompts or sizes.prompts, {"codec": given.codec} if given.codec else {}
    try:
        return CompareSpec.model_validate({
            "target": TargetSpec.model_validate({"model": given.target, "dtype": given.dtype}),
            "data": DataSpec(sources=tuple(DataSource(path=path) for path in given.data or [QUICKSTART]),
                             max_conversations=given.conversations or sizes.conversations, seed=given.seed),
            "families": families, "rivals": given.rival, "budget": Budget.parse(given.budget or sizes.budget),
            "regenerate": RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=128, concurrency=32,
                                         seed=given.seed),
            "capture": capture, "drafter": DrafterSpec(draft_vocab_size=vocabulary),
            "train": {"max_tokens_per_batch": sizes.batch_tokens, "seed": given.seed, "threads": given.threads},
            "benchmark": {
                "suites": [suite.model_copy(update={"max_prompts": prompts})
                           for suite in _suites(given.suites, shipped)],
                "temperatures": _numbers(given.temperatures, "--temperatures"), "tree": _tree(given.tree),
                "max_new_tokens": given.tokens or sizes.tokens, "seed": given.seed, "threads": given.threads},
            "concurrencies": _numbers(given.concurrency, "--concurrency"),
        })
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        raise InvalidInput(f"{where}: {rule_of(first)} (got {first['input']!r})",
                           "see eyrie compare --help") from None


def _suites(given: Sequence[str], shipped: bool) -> list[SuiteSpec]:
    if not given:
        return list(QUICKSTART_SUITES) if shipped else [SuiteSpec(name="held-out", path="held-out")]
    suites = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals:
            name, path = text.removeprefix("quickstart:").rpartition("/")[2].split(".")[0], text
        try:
            suites.append(SuiteSpec(name=name, path=path))
        except ValidationError:
            raise InvalidInput(f"--suites {text!r} gives no name in lower-case letters",
                               "write it as <name>=<path>") from None
    if len({suite.name for suite in suites}) < len(suites):
        raise InvalidInput(f"two --suites have one name: {', '.join(suite.name for suite in suites)}",
                           "write them as <name>=<path>")
    return suites


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidInput(f"{flag} {text!r} is not numbers", f"write it like {flag} 1,4") from None


def _tree(text: str) -> DraftTreeShape:
    try:
        steps, top_k, tokens = (int(part) for part in text.split("/"))
    except ValueError:
        raise InvalidInput(f"--tree {text!r} is not three numbers",
                           "write num_steps/top_k/num_draft_tokens, as in --tree 5/2/10") from None
    return DraftTreeShape(num_steps=steps, top_k=top_k, num_draft_tokens=tokens)

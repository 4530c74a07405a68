"""What a plan has to know of drafter families without loading one: what they read, how large they are, whom they suit.

Programs see a family as a row of functions (`eyrie_workers.drafters.family`), which needs torch; this table says the
same of sizes and layers in plain numbers, and a test holds the two together. Its sentences are for `eyrie plan`. They
say what follows from how a family works, and what `make compare` found on the shipped target
(docs/results/comparison.md); which is fastest for another target is shown by its leaderboard.

    H hidden, D draft vocabulary, V vocabulary, A aux layers, S tokens it looks ahead
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from eyrie_api.decisions.sweep import Candidate
from eyrie_api.v1alpha1.drafter import SGLANG_ALGORITHMS, Family

Reads = Literal["fused", "final", "none"]
"""Which of the target's states: several layers fused; the one after the final norm, at every position; none."""


@dataclass(frozen=True)
class FamilyFacts:
    """One family."""

    reads: Reads
    whole_vocabulary: bool
    """It predicts over the target's whole vocabulary, whatever `draft_vocab_size` says."""

    suits: str
    """When to choose it."""

    passes: str
    """What it costs to draft."""

    seen: float
    """Speed-up of its best form on the shipped target, greedy, one request at a time, after 100 s of training."""


FAMILIES: dict[Family, FamilyFacts] = {
    "eagle3": FamilyFacts("fused", False, "large targets and much data: it reads three of the target's layers and is "
                          "trained on its own errors; a second of training teaches it less",
                          "one small layer a token", 1.98),
    "eagle1": FamilyFacts("final", True, "little data or short training, and engines without EAGLE-3; a dynamic tree "
                          "makes it EAGLE-2", "one small layer a token, over the whole vocabulary", 2.41),
    "medusa": FamilyFacts("final", False, "shallow drafts at the lowest drafting cost: nothing runs between two depths",
                          "one pass for all depths", 2.33),
    "hydra": FamilyFacts("final", False, "where Medusa's heads contradict one another: each reads the tokens before "
                         "its own", "one perceptron a token", 2.43),
    "standalone": FamilyFacts("none", True, "where nothing of the target but its text is at hand; it stores least, and "
                              "its embedding and output matrix are its own", "a small language model a token", 1.80),
    "dflash": FamilyFacts("fused", True, "long drafts on hardware with arithmetic to spare: a whole block in one pass",
                          "one pass of a few layers for the block", 1.61),
}


def in_words(family: Family) -> str:
    """What `eyrie plan` says of a family."""
    facts = FAMILIES[family]
    engine = (f"SGLang serves it as {SGLANG_ALGORITHMS[family]}" if family in SGLANG_ALGORITHMS
              else "served by the embedded engine alone")
    return (f"{family}: {facts.suits}; drafting takes {facts.passes}; {facts.seen:.2f}x on the quickstart target, "
            f"trained for 100 s; {engine}")


def fuses(candidate: Candidate) -> bool:
    """Whether it reads several of the target's layers."""
    return FAMILIES[candidate.drafter.family].reads == "fused"


def named_layers(candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """Layers that candidates name themselves, ascending. Families that fuse none do not mind what is named."""
    return tuple(sorted({layer for one in candidates if fuses(one) for layer in one.drafter.aux_layers or ()}))


def reading_defaults(candidates: Iterable[Candidate]) -> tuple[Family, ...]:
    """Families of the candidates that name no layers, each once: what is captured for them is the capture stage's to
    choose."""
    return tuple(dict.fromkeys(one.drafter.family for one in candidates
                               if one.drafter.aux_layers is None or not fuses(one)))

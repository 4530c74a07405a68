"""In which forms each family is put on the bench: one table, after the papers. Pure.

A checkpoint is not yet a method. EAGLE-1 and EAGLE-2 are the same weights drafted in a fixed and in a grown tree;
DFlash's block is a chain, and the same block's marginals span DDTree's tree. So what is compared is a *form*: a family
in a shape. All chains have one depth and all trees one depth, width and number of nodes, so that two forms of a family
differ in the shape's kind alone, and two families in nothing but the drafter.

The engine knows none of these names. A family that the table lacks is put on the bench as a chain and as a tree.
"""

from typing import Literal, NamedTuple

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape

Kind = Literal["chain", "static tree", "tree", "off"]

OFF = "off"
"""The variant all others are compared with: the same engine, nothing drafted."""

IN_QUESTION = "eagle3"
"""The family the report's question is about: what one would take without measuring."""


class Form(NamedTuple):
    """One way to draft with a family's checkpoint."""

    title: str
    kind: Kind
    source: str


FORMS: dict[str, tuple[Form, ...]] = {
    "eagle1": (
        Form("EAGLE-1", "static tree", "arXiv:2401.15077, section 4.1: a fixed tree"),
        Form("EAGLE-2", "tree", "arXiv:2406.16858: EAGLE-1's checkpoint, expand and rerank by confidence"),
        Form("EAGLE-1 chain", "chain", "the same checkpoint without a tree"),
    ),
    "eagle3": (
        Form("EAGLE-3", "tree", "arXiv:2503.01840, with EAGLE-2's tree"),
        Form("EAGLE-3 chain", "chain", "the same checkpoint without a tree"),
    ),
    "medusa": (
        Form("Medusa", "static tree", "arXiv:2401.10774, section 2.3.3: a sparse tree chosen beforehand"),
        Form("Medusa best-first", "tree", "the heads' most probable prefixes, round by round"),
        Form("Medusa chain", "chain", "the heads' first choices"),
    ),
    "hydra": (
        Form("Hydra", "tree", "arXiv:2402.05109: heads that see the tokens before them"),
        Form("Hydra chain", "chain", "the heads' first choices"),
    ),
    "standalone": (Form("draft model", "chain", "arXiv:2211.17192: a small language model of its own"),),
    "dflash": (
        Form("DFlash", "chain", "arXiv:2602.06036: a block in one pass"),
        Form("DDTree", "tree", "arXiv:2604.12989: the block's marginals as a tree"),
    ),
    "ngram": (Form("n-gram", "chain", "prompt lookup: no weights, no training"),),
}


def forms_of(family: str) -> tuple[Form, ...]:
    """The family's rows of the table, or a chain and a tree where it has none."""
    untold = "not in the table of forms"
    return FORMS.get(family, (Form(family, "tree", untold), Form(f"{family} chain", "chain", untold)))


def shape(kind: Kind, tree: DraftTreeShape) -> DraftTreeShape | None:
    """The draft-tree shape of a kind. tree: depth of all kinds, width and nodes of all trees."""
    if kind == "off":
        return None
    if kind == "chain":
        return DraftTreeShape(num_steps=tree.num_steps, top_k=1, num_draft_tokens=tree.num_steps + 1)
    return tree.model_copy(update={"static": kind == "static tree"})

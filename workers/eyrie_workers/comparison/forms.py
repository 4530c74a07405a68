"""The forms in which `eyrie compare` measures each method. Pure.

A checkpoint can be drafted with in several ways. EAGLE-1 and EAGLE-2 are the same weights in a fixed and in a dynamic
tree; DFlash's block is a chain, and DDTree's tree is built from the same marginals. What is compared is a *form*: a
family with a tree shape. The forms of the families are in their table (`eyrie_api.v1alpha1.families`); this module adds
the methods without weights. All chains have one depth, and all trees one depth, width and number of nodes, so that two
forms of a family differ in the kind of shape only, and two families in the drafter only.
"""

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.families import FAMILIES, Form
from eyrie_workers.measurement.variant import VariantKind

OFF = "off"
"""The baseline: the same engine without a drafter."""

IN_QUESTION = "eagle3"
"""The family of the report's question: the default choice without a measurement."""

UNTRAINED_FORMS: dict[str, tuple[Form, ...]] = {
    "ngram": (Form("n-gram", "chain", "prompt lookup: no weights, no training"),),
}


def forms_of(method: str) -> tuple[Form, ...]:
    """The forms of a family or of a method without weights."""
    return UNTRAINED_FORMS[method] if method in UNTRAINED_FORMS else FAMILIES[method].forms


def shape(kind: VariantKind, tree: DraftTreeShape) -> DraftTreeShape | None:
    """The draft-tree shape of a kind. tree: depth of all kinds, width and nodes of all trees."""
    if kind == "off":
        return None
    if kind == "chain":
        return DraftTreeShape(num_steps=tree.num_steps, top_k=1, num_draft_tokens=tree.num_steps + 1)
    return tree.model_copy(update={"static": kind == "static tree"})

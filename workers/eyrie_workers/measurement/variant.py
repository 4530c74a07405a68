"""A variant: one configuration under measurement, a drafter with its settings or no drafter. Pure."""

from typing import Literal

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.families import TreeKind
from eyrie_api.v1alpha1.model import Frozen

VariantKind = TreeKind | Literal["off"]


class Variant(Frozen):
    """One configuration under measurement. All variants of a measurement share target, prompts, seeds and noise."""

    title: str
    """Its name in ledgers and reports; unique within a measurement."""

    family: str
    """Of the drafter; a rival's name, `ngram`, or `off` for no drafter."""

    kind: VariantKind
    tree: DraftTreeShape | None
    source: str = ""
    """Where this way to draft is described."""

    @property
    def shape(self) -> str:
        """The kind, with `num_steps/top_k/num_draft_tokens`."""
        if self.tree is None:
            return "nothing drafted"
        return f"{self.kind} {self.tree.num_steps}/{self.tree.top_k}/{self.tree.num_draft_tokens}"


def undrafted(title: str, source: str = "") -> Variant:
    """The engine without a drafter."""
    return Variant(title=title, family="off", kind="off", tree=None, source=source)


def drafted(tree: DraftTreeShape) -> Variant:
    """The measured drafter in one draft-tree shape, named after the shape."""
    kind: VariantKind = "static tree" if tree.static else "chain" if tree.top_k == 1 else "tree"
    return Variant(title=tree.label(), family="drafter", kind=kind, tree=tree)

"""Queries of the table of families (`eyrie_api.v1alpha1.families`) for plans and submissions. Pure."""

from collections.abc import Iterable

from eyrie_api.decisions.sweep import Candidate
from eyrie_api.v1alpha1.drafter import PublishedDrafter
from eyrie_api.v1alpha1.families import FAMILIES


def description(family: str) -> str:
    """The sentence of `eyrie plan` about a family."""
    row = FAMILIES[family]
    engine = (f"SGLang serves it as {row.sglang_algorithm}" if row.sglang_algorithm
              else "served by the embedded engine alone")
    return (f"{family}: for {row.best_for}; drafting takes {row.drafting_cost}; {row.quickstart_speedup:.2f}x on the "
            f"quickstart target, trained for 100 s; {engine}")


def fuses(candidate: Candidate) -> bool:
    """Whether the candidate's family fuses several layers of the target."""
    return FAMILIES[candidate.drafter.family].target_states == "fused"


def named_layers(candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """Layers named by the candidates, ascending. Names given to families that fuse no layers are ignored."""
    return tuple(sorted({layer for candidate in candidates if fuses(candidate)
                         for layer in candidate.drafter.aux_layers or ()}))


def families_with_default_layers(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Families of the candidates that neither name layers nor continue from a drafter with layers of its own, each
    once: the capture stage chooses their layers."""
    return tuple(dict.fromkeys(candidate.drafter.family for candidate in candidates
                               if not fuses(candidate)
                               or (candidate.drafter.aux_layers is None and candidate.drafter.init_from is None)))


def init_from(candidates: Iterable[Candidate]) -> tuple[PublishedDrafter, ...]:
    """Drafters from which training of fusing candidates continues, each once: capture stores the layers they read."""
    return tuple(dict.fromkeys(candidate.drafter.head for candidate in candidates
                               if candidate.drafter.head is not None and fuses(candidate)))

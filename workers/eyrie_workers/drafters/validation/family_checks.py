"""What a family is asked to examine, and the examination of families whose loading is their contract."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.validation import target as check_target
from eyrie_workers.drafters.validation import tensors as check_tensors
from eyrie_workers.drafters.validation.finding import Finding, error
from eyrie_workers.drafters.validation.target import Target
from eyrie_workers.targets.config import TargetConfig, parse_config


@dataclass(frozen=True)
class Parts:
    """A drafter as it lies on disk, or as it is about to be written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the names they are stored under."""

    card: Card | None = None


@dataclass(frozen=True)
class Examined:
    """A drafter's directory and what it is to be used with."""

    directory: Path
    parts: Parts
    target: Target | None = None
    """None: it is judged by itself."""

    context: int | None = None
    """Tokens it shall be served with; None: whatever the two configs allow."""

    weights: bool = True
    """Also compare the target's weights with the card, which reads them all."""


Examine = Callable[[Examined], tuple[Finding, ...]]


def loaded_by(family: str, load: Callable[[Path, TargetConfig | None], object]) -> Examine:
    """Findings of a family whose loading refuses what breaks its contract.

    load   strict; for this target, when one is given that Eyrie can compute. Raises EyrieError with the hint
    """

    def examine(one: Examined) -> tuple[Finding, ...]:
        found = [*_findings(family, load, one)]
        return tuple(sorted(found, key=lambda finding: finding.severity != "error"))

    return examine


def _findings(family: str, load: Callable[[Path, TargetConfig | None], object], one: Examined) -> Iterator[Finding]:
    config, card, target = one.parts.config, one.parts.card, one.target
    if card is not None and card.family != family:
        yield error("card-disagrees", f"its card is of a {card.family} drafter, its config.json of a {family} one",
                    "export the drafter again")
    try:
        load(one.directory, None if target is None else parse_config(target.config))
    except EyrieError as fault:
        yield error("contract", fault.message, fault.hint)
        return
    yield from check_tensors.value_rules(one.parts.tensors)
    if "max_position_embeddings" in config:
        yield from check_target.context_rules(config, target, one.context, card)
    if target is not None:
        yield from check_target.vocabulary_rules(config, target)
        yield from check_target.dtype_rules(config, target)
        yield from check_target.identity_rules(card, target, one.directory, weights=one.weights)

"""Validators: what every family implements to check one of its drafter directories.

EAGLE-3 has a validator of its own (`drafters.eagle3.validation`). The loaders of the other families refuse everything
that breaks the contract, so their validator is `validator_by_loading`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.validation.finding import Finding, error, errors_first
from eyrie_workers.drafters.validation.target import (
    Target,
    context_rules,
    dtype_rules,
    identity_rules,
    vocabulary_rules,
)
from eyrie_workers.drafters.validation.values import value_rules
from eyrie_workers.targets.config import TargetConfig, describe_config


@dataclass(frozen=True)
class DrafterFiles:
    """The contents of a drafter directory, read or about to be written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the names in the file."""

    card: Card | None = None


@dataclass(frozen=True)
class ValidationRequest:
    """A drafter directory, and the target and context to validate it for."""

    directory: Path
    files: DrafterFiles
    target: Target | None = None
    """None: the drafter is validated without a target."""

    context: int | None = None
    """Context length in tokens it will be served with; None: the limits of the two configs."""

    compare_weights: bool = True
    """Compare the digest of the target's weights with the card, which reads all of them."""


Validator = Callable[[ValidationRequest], tuple[Finding, ...]]
Load = Callable[[Path, TargetConfig | None], object]


def validator_by_loading(family: str, load: Load) -> Validator:
    """The validator of a family whose loader refuses every directory that breaks its contract.

    load   strict loader; checks the fit with the given target. Raises EyrieError with a hint.
    """

    def validate(request: ValidationRequest) -> tuple[Finding, ...]:
        return errors_first([*_findings(family, load, request)])

    return validate


def _findings(family: str, load: Load, request: ValidationRequest) -> Iterator[Finding]:
    config, card, target = request.files.config, request.files.card, request.target
    if card is not None and card.family != family:
        yield error("card-disagrees", f"its card is of a {card.family} drafter, its config.json of a {family} one",
                    "export the drafter again")
    try:
        load(request.directory, None if target is None else describe_config(target.config))
    except EyrieError as fault:
        yield error("contract", fault.message, fault.hint)
        return
    yield from value_rules(request.files.tensors)
    if "max_position_embeddings" in config:
        yield from context_rules(config, target, request.context, card)
    if target is not None:
        yield from vocabulary_rules(config, target)
        yield from dtype_rules(config, target)
        yield from identity_rules(card, target, request.directory, compare_weights=request.compare_weights)

"""The interface of a drafter family, and the look-up of families by name or checkpoint.

Stages, engine and reports see a family only through this interface and its row in the table of families
(`eyrie_api.contract.families`). The module named by the row defines `FAMILY`, a `FamilyImplementation`; it contains the
architecture as an `nn.Module` (the drafter), its training objective, its checkpoint format, and a class that implements
`speculation.protocol.Drafter` for decoding (the proposer). It is imported when the family is first used, so that a
program loads only the families it needs.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.families import FAMILIES, DrafterFamily
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.planning.sglang_support import holds_mtp_layers
from eyrie_api.planning.training_cost import TrainedDrafter
from eyrie_workers.drafters.card import Card
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, read_config
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.drafters.validation import Validator
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.loop import DEFAULT_LEARNING_RATE
from eyrie_workers.training.objective import Objective

Layers = tuple[int, ...]
"""`hidden_states` indices, ascending: 0 embeddings, i + 1 output of layer i, num_layers after the final norm."""

MEASURED_WIDTH = 256
"""Hidden size of the target on which the default learning rates were measured."""


@dataclass(frozen=True)
class FamilyImplementation:
    """The functions of one family. `Any` stands for the family's own `nn.Module`."""

    name: str
    """Name of its row in the table of families."""

    create: Callable[[DrafterSpec, TargetConfig, TargetEmbeddings, Layers, DraftVocabulary, int], nn.Module]
    """A new drafter: (spec, target, target's embeddings, layers it reads, draft vocabulary, seed). The spec's
    `max_draft_tokens` is set."""

    objective: Callable[[Any, TargetEmbeddings, TrainSpec, int, torch.dtype], Objective[Any]]
    """Training objective: (drafter, target's embeddings, spec, longest document, compute dtype). The documents carry
    the layers of `layers` only."""

    save: Callable[[Path, Any, str, Card | None], None]
    """Export: (directory, drafter, dtype, card). Atomic; the same drafter gives the same bytes."""

    load: Callable[[Path, TargetConfig | None], Any]
    """The drafter of an export, on the default device, for this target if one is given. Raises ArtifactMissing, and
    CheckpointInvalid for everything that breaks the family's contract."""

    proposer: Callable[[Any, TargetModel], Drafter]
    """A drafter that was loaded for this target, for decoding. The caller sets the default device to the target's
    (`targets.device.device_scope`)."""

    validate: Validator | None = None
    """Findings about a directory of the family's architecture; None: `validation.rules_by_loading`."""

    trained: Callable[[Any], TrainedDrafter] | None = None
    """Sizes of a drafter as `planning.training_cost` takes them; None: its step is not described there."""

    learning_rate: float = DEFAULT_LEARNING_RATE
    """Default peak learning rate, measured on the quickstart target, whose width is `MEASURED_WIDTH`."""

    rate_falls: bool = True
    """Whether that rate falls with the width of a wider target. False for drafters of blocks, whose rate was not
    measured on one."""

    @property
    def row(self) -> DrafterFamily:
        return FAMILIES[self.name]

    def default_rate(self, width: int) -> float:
        """Default peak learning rate for a target of this hidden size. Adam's best rate is inversely proportional to
        the width of a matrix (arXiv:2203.03466, table 3); a narrower target than the measured one keeps its rate."""
        return self.learning_rate * (min(1.0, MEASURED_WIDTH / width) if self.rate_falls else 1.0)

    def layers(self, fused: Layers, num_layers: int) -> Layers:
        """Layers of the target that the family reads.

        Capture stores the layers of all families of a job; each objective gets those of its own family.

        fused       layers selected for families that fuse several
        num_layers  of the target
        """
        return {"fused": fused, "final": (num_layers,), "none": ()}[self.row.target_states]


UNTRAINED: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""`Setting.method` -> constructor, for drafters without a checkpoint."""


def family_named(name: str) -> FamilyImplementation:
    """The implementation of a `DrafterSpec.family`. Raises InvalidInput for an unknown name."""
    if name not in FAMILIES:
        raise InvalidInput(f"drafter.family {name!r} is not known", f"use one of {', '.join(FAMILIES)}")
    return _implementation(FAMILIES[name])


def family_of(config: Mapping[str, Any]) -> FamilyImplementation | None:
    """The family of a checkpoint, from its config.json; None when it is of no family."""
    for row in FAMILIES.values():
        if config.get("architectures") in ([row.architecture], *([name] for name in row.read_architectures)) and (
                row.of_target == holds_mtp_layers(config)):
            return _implementation(row)
    return None


def _implementation(row: DrafterFamily) -> FamilyImplementation:
    family = import_module(row.module).FAMILY
    # A wrong row is a programming error: the family would be trained or served as another one.
    assert isinstance(family, FamilyImplementation), f"{row.module}.FAMILY is not a FamilyImplementation"
    assert family.name == row.name, f"{row.module}.FAMILY is {family.name!r}, its row in FAMILIES is {row.name!r}"
    return family


def layers_of(families: Iterable[str], fused: Layers, num_layers: int) -> Layers:
    """Layers to capture for these families: every layer that one of them reads, ascending.

    fused  layers selected for families that fuse several
    """
    return tuple(sorted({layer for name in families for layer in family_named(name).layers(fused, num_layers)}))


def open_drafter(directory: Path, target: TargetModel) -> Drafter:
    """Load the drafter in `directory` for decoding with `target`. Raises ArtifactMissing when files are missing,
    CheckpointInvalid when it is damaged, of no known family or trained for another target, UnsupportedTarget for the
    target's own MTP layers."""
    config = read_config(directory)
    family = family_of(config)
    if family is None and holds_mtp_layers(config):
        raise UnsupportedTarget(f"{directory} holds MTP layers of the target, which Eyrie does not compute",
                                "use engine sglang")
    if family is None:
        named = json.dumps(config.get("architectures"))
        raise CheckpointInvalid(f"{directory} holds a drafter of architecture {named}",
                                f"use one of {', '.join(row.architecture for row in FAMILIES.values())}")
    with device_scope(target.device):
        return family.proposer(family.load(directory, target.config), target)


def open_method(method: str, directory: Path | None, target: TargetModel) -> Drafter | None:
    """The drafter of a `Setting.method`: the one in `directory`, an untrained one, or None for `off`. Raises
    InvalidInput for an unknown method or a missing directory, and what `open_drafter` raises."""
    if method == "off":
        return None
    if method in UNTRAINED:
        return UNTRAINED[method]()
    if method != "drafter":
        raise InvalidInput(f"method {method!r} is not known", f"use drafter, {', '.join(UNTRAINED)} or off")
    if directory is None:
        raise InvalidInput("method 'drafter' has no drafter directory", "name it, or use another method")
    return open_drafter(directory, target)

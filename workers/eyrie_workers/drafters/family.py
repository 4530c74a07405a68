"""The interface of a drafter family: how a drafter is created, trained, exported, validated and loaded for decoding.

Stages, engine and reports see a family only through this interface and its row in the table of families
(`eyrie_api.v1alpha1.families`). The module named by the row defines `FAMILY`, a `FamilyImplementation`; it contains the
architecture as an `nn.Module` (the drafter), its training objective, its checkpoint format, and a class that implements
`speculation.protocol.Drafter` for decoding (the proposer).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.decisions.training_cost import TrainedDrafter
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.families import FAMILIES, DrafterFamily
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.validation.validator import Validator
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.loop import DEFAULT_LEARNING_RATE
from eyrie_workers.training.objective import Objective

Layers = tuple[int, ...]
"""`hidden_states` indices, ascending: 0 embeddings, i + 1 output of layer i, num_layers after the final norm."""


@dataclass(frozen=True)
class FamilyImplementation:
    """The functions of one family. `Any` stands for the family's own `nn.Module`."""

    name: str
    """Name of its row in the table of families."""

    create: Callable[[DrafterSpec, TargetConfig, TargetEmbeddings, Layers, DraftVocabulary, int], nn.Module]
    """A new drafter: (spec, target, target's embeddings, layers it reads, draft vocabulary, seed). The spec's
    `max_draft_tokens` is set."""

    objective: Callable[[Any, TargetEmbeddings, TrainSpec, int, torch.dtype], Objective]
    """Training objective: (drafter, target's embeddings, spec, longest document, compute dtype). The documents carry
    the layers of `layers` only."""

    save: Callable[[Path, Any, str, Card | None], None]
    """Export: (directory, drafter, dtype, card). Atomic; the same drafter gives the same bytes."""

    load_proposer: Callable[[Path, TargetModel], Drafter]
    """Load an export for decoding: (directory, target). Raises ArtifactMissing, CheckpointInvalid. The caller sets the
    default device to the target's (`targets.device.device_scope`)."""

    validate: Validator
    """Findings about a directory of the family's architecture."""

    trained: Callable[[Any], TrainedDrafter] | None = None
    """Sizes of a drafter as `decisions.training_cost` takes them; None: its step is not described there."""

    load: Callable[[Path], nn.Module] | None = None
    """The drafter of an export, to continue its training; None: not possible. Raises as `load_proposer`."""

    learning_rate: float = DEFAULT_LEARNING_RATE
    """Default peak learning rate, measured on the quickstart target."""

    @property
    def row(self) -> DrafterFamily:
        """The family's row in the table of families."""
        return FAMILIES[self.name]

    def layers(self, fused: Layers, num_layers: int) -> Layers:
        """Layers of the target that the family reads.

        Capture stores the layers of all families of a job; each objective gets those of its own family.

        fused       layers selected for families that fuse several
        num_layers  of the target
        """
        return {"fused": fused, "final": (num_layers,), "none": ()}[self.row.target_states]

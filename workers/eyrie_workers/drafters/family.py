"""What the stages ask of a drafter family: how it is made, how it learns, how it is written, how it is served.

A family is a row of functions, and a row is all that stages, engine and reports ever see of it: none of them knows a
family by name. Adding one means one file with its architecture, its objective and its row, and one line in
`drafters.registry`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.validation.family_checks import Examine
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.loop import DEFAULT_LEARNING_RATE
from eyrie_workers.training.objective import Objective

Layers = tuple[int, ...]
"""`hidden_states` indices, ascending: 0 embeddings, i + 1 output of layer i, num_layers after the final norm."""


def fused(chosen: Layers, _num_layers: int) -> Layers:
    """The layers chosen for fusing: low, middle, high, or what the user gave."""
    return chosen


def final(_chosen: Layers, num_layers: int) -> Layers:
    """The state after the final norm alone, at every position: what families that go on from it read."""
    return (num_layers,)


def none(_chosen: Layers, _num_layers: int) -> Layers:
    """No layer: families that read tokens."""
    return ()


@dataclass(frozen=True)
class Family:
    """One family of drafters."""

    name: str
    """`DrafterSpec.family`."""

    architecture: str
    """`architectures[0]` of its checkpoints' config.json: how a directory tells what it holds."""

    create: Callable[[DrafterSpec, TargetConfig, TargetEmbeddings, Layers, DraftVocabulary, int], nn.Module]
    """A new drafter: (spec, target, target's ends, the layers it reads, draft vocabulary, seed). `max_draft_tokens` of
    the spec is filled in."""

    objective: Callable[[Any, TargetEmbeddings, TrainSpec, int, torch.dtype], Objective]
    """How it learns: (drafter, target's ends, spec, longest document, arithmetic). Its documents carry the layers of
    `layers` alone."""

    save: Callable[[Path, Any, str, Card | None], None]
    """Export: (directory, drafter, dtype, card). Whole or not at all; the same drafter writes the same bytes."""

    serve: Callable[[Path, TargetModel], Drafter]
    """Load an export for the engine: (directory, target). Raises ArtifactMissing, CheckpointInvalid. Called where the
    target computes (`targets.device.device_scope`): `checkpoint.read_tensors` and tensors made in it lie there."""

    examine: Examine
    """Everything that is wrong with a directory of its architecture (`drafters.check`)."""

    layers: Callable[[Layers, int], Layers] = fused
    """Which of the target's states it reads: (layers chosen for fusing, num_layers). Capture stores what all families
    of a job read; each is given its own."""

    whole_vocabulary: bool = False
    """It predicts over the target's whole vocabulary, whatever `draft_vocab_size` says: its output matrix is the
    target's, or its own text goes on with any token."""

    learning_rate: float = DEFAULT_LEARNING_RATE
    """Peak, where the spec leaves it out; measured on the quickstart target."""

"""A drafter family in one file: one linear head on the target's final state, predicting one token ahead.

`test_toy_family` adds it with one row in the table of families, as a new family is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import DrafterFamily, DrafterSizes
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.drafter_rules import tensor_rules
from eyrie_workers.drafters.card import Card
from eyrie_workers.drafters.checkpoint import (
    as_stored,
    headers_of,
    read_config,
    read_tensors,
    refuse,
    write_checkpoint,
)
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.heads import UNLIMITED_LENGTH, last_states
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftTree
from eyrie_workers.speculation.tree import build_tree_from_marginals
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.numerics import linear
from eyrie_workers.training.objective import Objective, Prediction
from eyrie_workers.training.unroll_plan import UnrollPlan


def _parameters(sizes: DrafterSizes) -> int:
    return sizes.target.hidden_size**2 + sizes.output_vocab_size * sizes.target.hidden_size


ROW = DrafterFamily(
    name="toy", title="Toy", module="tests.workers.drafters.toy_family", architecture="ToyDrafter",
    target_states="final", whole_vocabulary=True, parameters=_parameters, best_for="tests",
    drafting_cost="one product per round", quickstart_speedup=1.0)


class ToyDrafter(nn.Module):
    """h -> lm_head(project(h))."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden_size, hidden_size, bias=False)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)


class ToyObjective(Objective[ToyDrafter]):
    """Distillation of the token after the next."""

    def __init__(self, drafter: ToyDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, _max_positions: int,
                 dtype: torch.dtype) -> None:
        super().__init__(drafter, drafter.lm_head.out_features, embeddings.output_head, spec, steps=1, dtype=dtype)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """One state per root."""
        states_RH = linear(documents.aux[:, 0].index_select(0, plan.roots), self.drafter.project.weight)
        return Prediction((states_RH,), self.drafter.lm_head.weight)

    def flops(self, plan: UnrollPlan) -> int:
        """Both products at every root: once forward, twice backward."""
        hidden, vocab_size = self.drafter.lm_head.in_features, self.drafter.lm_head.out_features
        return 6 * plan.num_predictions * hidden * (hidden + vocab_size)


@dataclass
class ToyState:
    """[rows, H] the target's state at the last settled pair."""

    last: Tensor


class ToyProposer:
    """`speculation.protocol.Drafter`."""

    max_length = UNLIMITED_LENGTH

    def __init__(self, tensors: dict[str, Tensor], num_layers: int) -> None:
        self.aux_layers = (num_layers,)
        self._project, self._lm_head = tensors["project.weight"], tensors["lm_head.weight"]

    def new_state(self, num_rows: int) -> ToyState:
        """Zeros."""
        return ToyState(torch.zeros(num_rows, self._project.shape[1]))

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Does nothing: the first pairs overwrite the row's state."""

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Store each row's last state."""
        assert isinstance(state, ToyState)
        indices = pairs.indices()
        state.last[indices.rows] = last_states(pairs, indices)

    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One token per row."""
        assert isinstance(state, ToyState)
        logits = state.last[upload(rows)] @ self._project.T @ self._lm_head.T
        return build_tree_from_marginals(logits[:, None], shape, None, noise)


def _create(_spec: DrafterSpec, target: TargetConfig, _embeddings: TargetEmbeddings, _layers: Layers,
            _vocabulary: DraftVocabulary, seed: int) -> ToyDrafter:
    drafter = ToyDrafter(target.hidden_size, target.vocab_size)
    initialise_parameters(drafter, seed)
    return drafter


def _objective(drafter: ToyDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
               dtype: torch.dtype) -> Objective:
    return ToyObjective(drafter, embeddings, spec, max_positions, dtype)


def _save(directory: Path, drafter: ToyDrafter, dtype: str, card: Card | None) -> None:
    config = {"architectures": [ROW.architecture], "hidden_size": drafter.lm_head.in_features,
              "vocab_size": drafter.lm_head.out_features}
    write_checkpoint(directory, config, as_stored(drafter.state_dict(), dtype), card)


def _load(directory: Path, _target: TargetConfig | None = None) -> dict[str, Tensor]:
    config, tensors = read_config(directory), read_tensors(directory)
    hidden = config["hidden_size"]
    refuse(directory.name, tensor_rules(headers_of(tensors), {
        "project.weight": (hidden, hidden), "lm_head.weight": (config["vocab_size"], hidden)}))
    return tensors


FAMILY = FamilyImplementation(
    "toy", _create, _objective, _save, _load,
    lambda tensors, target: ToyProposer(tensors, target.config.num_layers), learning_rate=1e-2)

"""Medusa: several heads on the target's last state, each a guess further ahead (arXiv:2401.10774, section 2.1).

The target stands at position i and has chosen token x_{i+1} from its state h_i after the final norm. Head s, counted
from 0, says what comes s + 1 tokens behind that, from h_i alone:

    p_s = softmax(W2_s (SiLU(W1_s h_i) + h_i))           over x_{i+2+s}

W1_s starts at zero and W2_s as the target's output matrix, so that at first every head repeats what the target said of
x_{i+1}. Only the heads learn (Medusa-1); their losses are weighed by step_decay ** s (the paper's lambda ** k).

No head sees x_{i+1}, nor what the heads before it picked. So one pass says all depths, and a path is only as likely as
the product of its depths' marginals: trees are built from these (`speculation.marginals`), and nothing has to be run
between two depths. Hydra (`drafters.hydra`) is what one gets by letting heads see the tokens.

Each head has an output matrix of its own, as in the paper. Measured on the quickstart target (295 answers of 16 k
tokens, 4 epochs, 7 heads, D 1536, one run each; simulated speed-up over 780 held-out roots):

    peak learning rate               5e-4    2e-3    5e-3    1e-2
    one matrix for each head         1.64    2.77    3.23    3.24
    one for all heads, trained       1.54    2.46    3.01
    one for all heads, the target's  1.42

The price is memory: S D H numbers, four times over while they are trained. For D 32768, H 4096 and 7 heads these are
15 GB in float32; `drafter.draft_vocab_size` and `drafter.max_draft_tokens` lower it, and Hydra has one matrix.

The directory is what vLLM's `MedusaModel` loads (`model_executor/models/medusa.py`; read, not run): `blocks`, output
matrices, and a `token_map` where the draft vocabulary is smaller than the target's. SGLang 0.5.23 has no Medusa.

    B rows, R roots, S heads, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.checkpoint.heads import HeadsConfig, HeadsForm, load_heads, save_heads
from eyrie_workers.drafters.family import Family, final
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.validation.family_checks import loaded_by
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.speculation.marginals import build_tree_from_marginals
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter, DrafterState, DraftTree
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.linear import Linear
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.matmul import linear
from eyrie_workers.training.objective import DistillationObjective, Objective, Prediction
from eyrie_workers.training.unroll_plan import UnrollPlan


class _Block(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=False)])


class MedusaDrafter(nn.Module):
    """The parameters, under the names vLLM loads."""

    def __init__(self, config: HeadsConfig, vocabulary: DraftVocabulary) -> None:
        """Parameters at torch's default initialisation; `create` has a better start."""
        super().__init__()
        assert (config.vocab_size, config.draft_vocab_size) == (vocabulary.vocab_size, vocabulary.size)
        self.config, self.vocabulary = config, vocabulary
        self.blocks = nn.ModuleList(_Block(config.hidden_size) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
                                      for _ in range(config.num_heads))

    def block(self, head: int) -> Tensor:
        """W1 of a head: [H, H]."""
        return self.get_parameter(f"blocks.{head}.layers.0.weight")

    def output(self, head: int) -> Tensor:
        """W2 of a head: [D, H]."""
        return self.get_parameter(f"lm_heads.{head}.weight")


class MedusaObjective(DistillationObjective):
    """All heads at every root, from the state the target has there."""

    def __init__(self, drafter: MedusaDrafter, lm_head_VH: Tensor, spec: TrainSpec,
                 dtype: torch.dtype = torch.float32) -> None:
        super().__init__(drafter.vocabulary, lm_head_VH, spec, steps=drafter.config.num_heads, dtype=dtype)
        self._drafter = drafter

    @property
    def drafter(self) -> MedusaDrafter:
        """The module being trained."""
        return self._drafter

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """What each head makes of its roots' states; judged or not, for no head sees a token."""
        drafter, config = self._drafter, self._drafter.config
        h_RH = documents.aux[:, 0].index_select(0, plan.roots).to(drafter.block(0).dtype)
        heads = [head for head, alive in enumerate(plan.alive) if alive]
        states = [residual(h_RH[: plan.alive[head]], linear(h_RH[: plan.alive[head]],
                                                              drafter.block(head).to(self.dtype))) for head in heads]
        # Of W1 one product forward, one backward: h itself is not trained. Of W2 three; the teacher is asked once.
        flops = 2 * config.hidden_size * (
            plan.num_predictions * (2 * config.hidden_size + 3 * config.draft_vocab_size)
            + plan.target_positions().numel() * config.vocab_size)
        return Prediction(tuple(states), tuple(drafter.output(head).to(self.dtype) for head in heads), flops=flops)


def residual(h: Tensor, inner: Tensor) -> Tensor:
    """h + SiLU(inner), in h's dtype."""
    return h + F.silu(inner.to(h.dtype))


@dataclass
class MedusaState:
    """What is kept of each row."""

    last: Tensor
    """[rows, H] the target's state at the last settled pair."""


class MedusaServer:
    """`speculation.protocol.Drafter`: one pass for all heads, then a tree of their marginals."""

    max_length = 2**31 - 1
    """It knows no positions."""

    def __init__(self, drafter: MedusaDrafter, num_layers: int, dtype: torch.dtype) -> None:
        """`num_layers`: of the target. `dtype`: of drafting."""
        config = drafter.config
        self.aux_layers = final((), num_layers)
        self._num_heads, self._hidden_size, self._dtype = config.num_heads, config.hidden_size, dtype
        with torch.inference_mode():
            self._blocks = Linear(torch.cat([drafter.block(head) for head in range(config.num_heads)]).to(dtype))
            self._outputs = [Linear(drafter.output(head).to(dtype)) for head in range(config.num_heads)]
            self._device = drafter.block(0).device
            vocabulary = drafter.vocabulary
            whole = vocabulary.size == vocabulary.vocab_size
            self._draft_ids_D = None if whole else vocabulary.ids.to(self._device)

    def new_state(self, num_rows: int, max_length: int, max_shape: DraftTreeShape) -> MedusaState:
        """One state for each row."""
        return MedusaState(torch.zeros(num_rows, self._hidden_size, dtype=self._dtype, device=self._device))

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Nothing to forget: the first pairs overwrite what is there."""

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Keep each row's last state."""
        assert isinstance(state, MedusaState)
        state.last[pairs.rows] = last_states(pairs).to(self._dtype)

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Tensor, shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """The tree of what the heads say; NO_TOKEN beyond the last head."""
        assert isinstance(state, MedusaState)
        h_BH = state.last[rows]
        h_BSH = residual(h_BH[:, None], self._blocks(h_BH).view(h_BH.shape[0], self._num_heads, -1))
        asked = min(shape.num_steps, self._num_heads)
        logits_BSD = torch.stack([self._outputs[head](h_BSH[:, head].contiguous()) for head in range(asked)], 1)
        return build_tree_from_marginals(logits_BSD, shape, self._draft_ids_D, noise)


def last_states(pairs: CommittedTokens) -> Tensor:
    """[B, H] the first aux state of each row's last pair."""
    rows = torch.arange(pairs.lengths.numel(), device=pairs.aux.device)
    return pairs.aux[rows, (pairs.lengths - 1).to(pairs.aux.device), 0]


def _shapes(config: HeadsConfig) -> Mapping[str, tuple[int, ...]]:
    hidden = config.hidden_size
    return {f"blocks.{head}.layers.0.weight": (hidden, hidden) for head in range(config.num_heads)} | {
        f"lm_heads.{head}.weight": (config.draft_vocab_size, hidden) for head in range(config.num_heads)}


_FORM = HeadsForm("medusa", "MedusaModel", False, _shapes)


@torch.no_grad()
def create(spec: DrafterSpec, target: TargetConfig, ends: TargetEmbeddings, _layers: tuple[int, ...],
           vocabulary: DraftVocabulary, _seed: int) -> MedusaDrafter:
    """Heads that all repeat the target's own choice."""
    assert spec.max_draft_tokens is not None
    drafter = MedusaDrafter(HeadsConfig(target.hidden_size, target.vocab_size, vocabulary.size, spec.max_draft_tokens),
                            vocabulary)
    rows_DH = ends.lm_head.index_select(0, vocabulary.ids.to(ends.lm_head.device))
    for head in range(spec.max_draft_tokens):
        drafter.block(head).zero_()
        drafter.output(head).copy_(rows_DH)
    return drafter


def _objective(drafter: MedusaDrafter, ends: TargetEmbeddings, spec: TrainSpec, _max_positions: int,
               dtype: torch.dtype) -> Objective:
    return MedusaObjective(drafter, ends.lm_head, spec, dtype)


def save(directory: Path, drafter: MedusaDrafter, dtype: str = "float32", card: Card | None = None) -> None:
    """Write a drafter to `directory`, replacing what is there, atomically."""
    save_heads(directory, _FORM, drafter.config, drafter.vocabulary, drafter.state_dict(), dtype, card)


def load(directory: Path, target: TargetConfig | None) -> MedusaDrafter:
    """Read a drafter for `target`. Raises ArtifactMissing or CheckpointInvalid."""
    stored = load_heads(directory, _FORM, target)
    drafter = MedusaDrafter(stored.config, stored.vocabulary)
    drafter.load_state_dict(stored.tensors, assign=True)
    return drafter


def _serve(directory: Path, target: TargetModel) -> Drafter:
    return MedusaServer(load(directory, target.config), target.config.num_layers, target.dtype)


FAMILY = Family(_FORM.family, _FORM.architecture, create, _objective, save, _serve, loaded_by(_FORM.family, load),
                layers=final, learning_rate=5e-3)

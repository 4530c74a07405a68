"""A small language model of its own as drafter: speculative decoding as it began (arXiv:2211.17192, arXiv:2302.01318).

It reads tokens and nothing of the target, in the target's vocabulary, and goes on one token a pass:

    q(x_{i+1} | x_0 .. x_i) = softmax(lm_head(norm(layers(embed(x_0) .. embed(x_i)))))

Verification here takes the target's own choice at every node (`speculation.verify`), so what counts is how often the
two choose alike. Hence it is distilled: taught on the target's own answers, with the target's whole distribution p at
each position as teacher (DistillSpec, arXiv:2310.08461, with the target's text in place of the drafter's own and
forward KL by default; `train.loss: tv` is one minus the acceptance of sampled tokens itself),

    L = mean over the answer's tokens of  D(p(. | x_<t), q(. | x_<t))

One causal pass over whole documents yields every position at once. Step s of a draft from root i and step s - 1 from
root i + 1 are here the very same prediction, so learning takes each position once; judged, it counts at every (i, s).

On disk it is a plain Llama (`LlamaForCausalLM`, Hugging Face's names): `transformers` and SGLang's STANDALONE load it
as it is. What makes it a drafter is the card beside it. Its heads have the target's size, its rope is the target's;
width and depth are its own: by default half the target's width and two layers. Embedding and output matrix are its own
too: with a vocabulary of 150 000 they are most of it, which is what EAGLE later did away with.

Both begin as the target's, seen from the directions in which their rows differ most: with E = U S V' (singular values
descending), embed = E V_h, the best the drafter's width h holds of the target's geometry; the output matrix likewise,
with the weight of the target's last norm folded in. Measured on 150 conversations of the quickstart target, 130 steps,
251 held-out roots: simulated speed-up 2.39 and first-step accuracy .59 (with other signs of the same directions 2.51
and .61: the spread of two runs), against 2.05 and .49 from random ends.

    T packed tokens, N asked positions, B rows, H hidden, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.checkpoint.files import (
    CheckpointInvalid,
    as_stored,
    exact_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)
from eyrie_workers.drafters.family import Family, Layers, none
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.layers.decoder import (
    DecoderLayer,
    Norm,
    causal,
    decoder_json,
    heads_for,
    initialise,
    layer_flops,
    refuse_eagle_fields,
)
from eyrie_workers.drafters.layers.kv_cache import DrafterKVCache, NewTokens, behind, beside
from eyrie_workers.drafters.validation.family_checks import loaded_by
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, Drafter, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import BranchKeys, build_draft_tree
from eyrie_workers.targets.config import TargetConfig, parse_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.rotary import Rotary
from eyrie_workers.training.attention import pick
from eyrie_workers.training.fused import rms_norm
from eyrie_workers.training.objective import DistillationObjective, Objective, Prediction, StepContext
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

ARCHITECTURE = "LlamaForCausalLM"
_NUM_LAYERS = 2


class _Body(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size)


class StandaloneDrafter(nn.Module):
    """The parameters, under the names of Hugging Face's Llama."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def states(self, documents: PackedBatch, angles: Tensor, asked: Tensor, dtype: torch.dtype,
               recompute: bool = False) -> Tensor:
        """[N, H] states before the output matrix at the packed positions `asked`, distinct; angles [T, 2, E / 2]."""
        config = self.config
        x_TH = F.embedding(documents.token_ids, self.model.embed_tokens.weight)
        layers = [layer.weights(dtype) for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        for number, layer in enumerate(layers):
            attended_TQ = causal(*layer.heads(x_TH, angles), documents.lengths)
            if number + 1 == len(layers):  # behind the last attention only what is asked goes on
                x_TH, attended_TQ = pick(x_TH, asked), pick(attended_TQ, asked)
            x_TH = layer.finish(x_TH, attended_TQ, recompute)
        return rms_norm(x_TH, self.model.norm.weight, config.rms_eps)


class Distillation(DistillationObjective):
    """StandaloneDrafter taught by the target on the target's answers."""

    def __init__(self, drafter: StandaloneDrafter, ends: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype) -> None:
        vocab_size = drafter.config.vocab_size
        super().__init__(DraftVocabulary(torch.arange(vocab_size), vocab_size), ends.lm_head, spec, dtype=dtype)
        self._drafter, self._recompute = drafter, spec.grad_checkpoint
        self._target_hidden = ends.lm_head.shape[1]
        self._rotary = Rotary(drafter.config.rope, drafter.config.head_dim, max_positions)

    @property
    def drafter(self) -> StandaloneDrafter:
        """The module being trained."""
        return self._drafter

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """Learning: step 0 of every root, which is every position once. Judged: as it is served."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps if context is None else 1)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """Step s of root i is the state after the true token i + 1 + s."""
        asked = plan.target_positions()
        states_NH = self._drafter.states(documents, self._rotary.at(plan.positions), asked, self.dtype,
                                         self._recompute)
        row_T = torch.full_like(documents.token_ids, -1)
        row_T[asked] = torch.arange(asked.numel(), device=asked.device)
        states = tuple(states_NH.index_select(0, row_T[plan.roots[:alive] + 1 + step])
                       for step, alive in enumerate(plan.alive) if alive)
        return Prediction(states, self._drafter.lm_head.weight.to(self.dtype), flops=self._flops(documents, asked))

    def _flops(self, documents: PackedBatch, asked: Tensor) -> int:
        config, num_tokens, num_asked = self._drafter.config, documents.token_ids.numel(), asked.numel()
        seen = sum(length * (length + 1) // 2 for length in documents.lengths)
        heads = 6 * num_asked * config.hidden_size * config.vocab_size
        return (config.num_layers * layer_flops(config, num_tokens, seen) + heads
                + 2 * num_asked * self._target_hidden * config.vocab_size)


@dataclass
class StandaloneState:
    """Keys of every row's text, and the prediction behind its last token: logits [rows, V]."""

    kept: DrafterKVCache
    logits: Tensor


class StandaloneServer:
    """`speculation.protocol.Drafter` over a Llama of its own."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: TargetModel) -> None:
        self.branch_keys: BranchKeys = "ancestors"
        self.reads_first_token = True
        """SGLang's STANDALONE pairs each position with the token that follows, as EAGLE does, though there is no state
        to go with it: the text's first token is never read. False does the same."""
        self._model = model
        self.max_length = model.config.max_position_embeddings

    def new_state(self, num_rows: int, max_length: int, max_shape: DraftTreeShape) -> StandaloneState:
        """Caches for `num_rows` rows of `max_length` tokens, with room for the scratch keys of `max_shape`."""
        config, dtype = self._model.config, self._model.dtype
        places = max_length + max(max_shape.num_steps * max_shape.top_k, max_shape.num_draft_tokens) + 2
        return StandaloneState(DrafterKVCache(config, num_rows, places, dtype),
                               torch.zeros(num_rows, config.vocab_size, dtype=dtype))

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Read the first token: the others come as the followers of their positions."""
        assert isinstance(state, StandaloneState)
        state.kept.settled[row] = 0
        if self.reads_first_token:
            self._read(state, [row], torch.tensor([list(prompt[:1])]), [1])

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Read the tokens of the pairs, and predict from the last of each row."""
        assert isinstance(state, StandaloneState)
        self._read(state, pairs.rows.tolist(), pairs.tokens, pairs.lengths.tolist())

    @torch.inference_mode()
    def _read(self, state: StandaloneState, rows: list[int], tokens_BT: Tensor, lengths: list[int]) -> None:
        first, num_new = [state.kept.settled[row] for row in rows], tokens_BT.shape[1]
        positions_BT = torch.tensor(first)[:, None] + torch.arange(num_new)
        attend = NewTokens(state.kept, rows, first, num_new, behind(first, num_new))
        _, states = self._model.run(tokens_BT.flatten(), positions_BT.flatten(), attend)
        ends_B = torch.arange(len(rows)) * num_new + torch.tensor(lengths) - 1
        state.logits[torch.tensor(rows)] = self._model.logits(states.index_select(0, ends_B))
        for row, start, length in zip(rows, first, lengths, strict=True):
            state.kept.settled[row] = start + length

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Tensor, shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """Grow one tree per row from the predictions `extend` left. Its memory is its keys: a node has no state."""
        assert isinstance(state, StandaloneState)
        own, row_list = state, rows.tolist()
        settled = [state.kept.settled[row] for row in row_list]

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            num_new, num_scratch = mask.shape[1:]
            first = [held + num_scratch - num_new for held in settled]
            positions_BN = (torch.tensor(settled)[:, None] + (depth - 1)).expand(-1, num_new)
            attend = NewTokens(own.kept, row_list, first, num_new, beside(settled, mask))
            _, states = self._model.run(tokens.flatten(), positions_BN.flatten(), attend)
            return DraftStep(self._model.logits(states).view(*tokens.shape, -1), hidden)

        logits = state.logits.index_select(0, rows)[:, None]
        first = DraftStep(logits, logits.new_zeros(len(row_list), 1, 1))
        return build_draft_tree(first, step, shape, None, noise, self.branch_keys)


def _create(
    spec: DrafterSpec,
    target: TargetConfig,
    ends: TargetEmbeddings,
    _layers: Layers,
    _vocabulary: DraftVocabulary,
    seed: int,
) -> StandaloneDrafter:
    refuse_eagle_fields(spec, "standalone")
    head_dim = target.head_dim
    hidden = spec.hidden_size or max(1, round(target.hidden_size / 2 / head_dim)) * head_dim
    num_heads, num_kv_heads = heads_for(spec, target, max(1, hidden // head_dim))
    # An MLP as wide as the target's beside a narrow stream would be most of the drafter: the target's proportion.
    width = spec.intermediate_size or max(8, round(target.intermediate_size * hidden / target.hidden_size / 8) * 8)
    num_layers = spec.num_layers or _NUM_LAYERS
    drafter = StandaloneDrafter(replace(
        target, family="llama", hidden_size=hidden, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, intermediate_size=width, tie_word_embeddings=False, qk_norm=False,
        attention_bias=False, output_bias=False, mlp_bias=False, layer_types=("full_attention",) * num_layers,
        sliding_window=None, post_norm=False, full_rope=None,
        max_position_embeddings=spec.max_position_embeddings or target.max_position_embeddings))
    initialise(drafter, seed)
    with torch.no_grad():
        _inherit(drafter.model.embed_tokens.weight, ends.embed)
        _inherit(drafter.lm_head.weight, ends.lm_head * ends.norm)
    return drafter


def _inherit(own_Vh: Tensor, rows_VH: Tensor) -> None:
    """The target's rows along their main directions, as many as there is room for."""
    _, directions_HH = torch.linalg.eigh((rows_VH.T @ rows_VH).double())  # ascending
    kept = min(own_Vh.shape[1], rows_VH.shape[1])
    own_Vh[:, :kept] = rows_VH @ directions_HH.flip(1)[:, :kept].to(rows_VH.dtype)


def _objective(drafter: StandaloneDrafter, ends: TargetEmbeddings, spec: TrainSpec, max_positions: int,
               dtype: torch.dtype) -> Objective:
    return Distillation(drafter, ends, spec, max_positions, dtype)


def _save(directory: Path, drafter: StandaloneDrafter, dtype: str, card: Card | None) -> None:
    write_checkpoint(directory, decoder_json(drafter.config, ARCHITECTURE, dtype),
                     as_stored(drafter.state_dict(), dtype), card)


def load(directory: Path, target: TargetConfig | None = None) -> tuple[TargetConfig, dict[str, Tensor]]:
    """Configuration and tensors of an export, for this target if one is given. Raises ArtifactMissing,
    CheckpointInvalid."""
    try:
        config = parse_config(read_config(directory))
    except UnsupportedTarget as error:
        raise CheckpointInvalid(f"drafter {directory.name}: {error.message}", error.hint) from error
    if config.family != "llama" or config.tie_word_embeddings or config.sliding_window is not None:
        raise CheckpointInvalid(f"drafter {directory.name} is a {config.family} that Eyrie did not write: a standalone "
                                "drafter is a Llama with an output matrix of its own and no window",
                                "serve this one in SGLang, or train one")
    tensors = read_tensors(directory)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in StandaloneDrafter(config).state_dict().items()}
    exact_tensors(directory.name, tensors, expected)
    if target is not None and config.vocab_size != target.vocab_size:
        raise CheckpointInvalid(f"drafter {directory.name} has a vocabulary of {config.vocab_size}, this target one of "
                                f"{target.vocab_size}", "serve it with its own target")
    return config, tensors


def _serve(directory: Path, target: TargetModel) -> Drafter:
    config, tensors = load(directory, target.config)
    return StandaloneServer(TargetModel(
        config, {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}, directory))


# 130 steps of 1024 tokens: simulated speed-up (loss) 2.25 (1.76) at 1e-3, 2.39 (1.66) at 2e-3, 2.49 (1.72) at 3e-3;
# from random ends 1.82 at 1e-3, 2.05 at 2e-3, 1.52 at 3e-3, 1.28 at 6e-3.
FAMILY = Family("standalone", ARCHITECTURE, _create, _objective, _save, _serve, loaded_by("standalone", load),
                layers=none, whole_vocabulary=True, learning_rate=2e-3)

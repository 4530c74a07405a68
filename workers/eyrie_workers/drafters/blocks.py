"""Drafters of blocks: DFlash (arXiv:2602.06036), and with a head that reads the drafted tokens DSpark
(arXiv:2607.05147, `markov_head`), Domino (arXiv:2605.29707, `domino`), DFlash2 (`dflash2`) and LiLiCorr
(arXiv:2608.20530, `lilicorr`).

EAGLE drafts one token per pass; these a whole block. The last settled token x_{i+1} is followed by mask tokens, and one
pass through a few layers gives marginals for the tokens after it:

    block            B_i = [x_{i+1}, MASK, .., MASK] of C positions, from i+1 on
    features         c_j = hidden_norm(fc(concat of the aux states at j))                     of settled j = 0 .. i
    keys, values     of every layer:  W_k c_j, W_v c_j  before  W_k n(h), W_v n(h)  of the block itself
    attention        every position of the block attends to all features and the whole block, in both directions
    DFlash           p_s = softmax(W_head norm(h_{s+1})): MASK s+1 is at the position of x_{i+2+s}, which step s
                     proposes; S = C - 1
    DSpark           p_s = softmax(W_head norm(h_s) + W_2 z_s): the position before proposes, the settled token's too,
                     and z_s reads the token before (`markov_head`); S = C
    Domino           the same with z_s of all drafted tokens before, and S = C - 1 (`domino`)
    DFlash2          DFlash's positions; the softmax of scores over a few candidates of each position (`dflash2`)
    LiLiCorr         the same with other scores, of all positions' candidates at once (`lilicorr`)

The features enter each layer as keys and values only; settled positions run neither attention nor MLP. Embedding and
output matrix are the target's, frozen. The layers are Qwen3's, with norms on the heads of q and k, as SGLang's DFLASH
and DSPARK load them (0.5.23, `srt/models/dflash.py`, `srt/models/dspark.py`).

Each optimizer step trains on blocks after random anchors i of the answer (`unrolled_fraction` of the positions:
neighbouring blocks make nearly the same predictions, and random anchors gain 14 % of tau over fixed ones in DFlash's
ablation), against the target's distribution. Position s has weight step_decay^s: a wrong token invalidates the
tokens after it, so early positions count more (DFlash's exp(-s / gamma); 0.8 is its gamma of 4.5, between its 4 for
blocks of 8 and 5 for blocks of 10). A head reads the true tokens in training: in decoding a prediction matters only
after an accepted path.

Without the head a marginal does not depend on the tokens chosen before it: a tree is DDTree (arXiv:2604.12989), the
most probable prefixes under the product of marginals. With it trees grow by confidence, token by token, from one pass
over the block (`speculation.tree`).

The mask is a token of the target's vocabulary, since the embedding is the target's: the last special token of the
tokenizer that does not end answers (reserved and image tokens come last), or the last id where there is none. It is
stored as `dflash_config.mask_token_id`.

SGLang runs both on CUDA, NPU and XPU only, as a chain with a block as its window. `tests/sglang/test_blocks` runs its
workers on a CPU, with kernels replaced: they accept the same tokens as Eyrie's engine from these exports.

    T packed tokens, A aux layers, R roots, S steps, C block positions, L layers, B rows, H hidden, V vocabulary,
    K kv heads, W query heads per kv head, E head size, M rank of the Markov head
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES, convolution_sizes, domino_sizes, lilicorr_width, markov_rank
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.drafter_rules import DFLASH2, LILICORR
from eyrie_workers.drafters import checkpoint
from eyrie_workers.drafters.card import Card
from eyrie_workers.drafters.decoder import DecoderLayer, decoder_config, decoder_json, layer_flops
from eyrie_workers.drafters.dflash2 import (
    CANDIDATES,
    CandidateSelector,
    Convolutions,
    GroupedConvolution,
    SelectorConfig,
)
from eyrie_workers.drafters.domino import DominoConfig, DominoHead, base_share
from eyrie_workers.drafters.initialisation import TargetEmbeddings, initialise_parameters
from eyrie_workers.drafters.kv_cache import DrafterKVCache, NewTokens, RowLengths, all_scratch_mask
from eyrie_workers.drafters.lilicorr import LiLiCorrConfig, LiLiCorrHead
from eyrie_workers.drafters.markov_head import BlockHead, ConfidenceHead, MarkovConfig, MarkovHead
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DrafterState, DraftStep, DraftTree
from eyrie_workers.speculation.tree import build_limited_tree, build_tree_from_marginals
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import upload
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel, pairs_together
from eyrie_workers.targets.operators import Linear, Rotary, rms_normalise
from eyrie_workers.training.attention import SharedKeys, attend_block
from eyrie_workers.training.numerics import PostAttention, linear, rms_norm
from eyrie_workers.training.objective import Objective, Prediction, StepContext, draw_positions
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

_MAX_LAYERS = 5  # the paper's; 8 raise tau by 6 % and lower the speed-up
_DOMINO_HEAD, _DOMINO = "domino_head.", ("prefix_gru.", "embed_proj.")  # its prefix here, and its names in a checkpoint
_HEADS = ("markov_head.", "confidence_head.", "candidate_selector.", "lilicorr.", _DOMINO_HEAD)
_TARGET_LAYERS_PER_LAYER = 6  # for a shallow target five layers would cost as much as they save


@dataclass(frozen=True)
class DFlashConfig:
    decoder: TargetConfig
    """Config of the layers. Width and vocabulary are the target's."""

    block_size: int
    """C: the settled token and the masks after it."""

    aux_layers: tuple[int, ...]
    """`hidden_states` indices (0 = embeddings), ascending."""

    num_target_layers: int
    mask_token_id: int
    markov: MarkovConfig | None = None
    """Of DSpark, whose settled token's position proposes too."""

    confidence: bool = False
    """Whether a confidence head stands next to the Markov head."""

    domino: DominoConfig | None = None

    selector: SelectorConfig | None = None
    """Of DFlash2."""

    convolution: tuple[int, int] | None = None
    """Taps and channels of a group."""

    lilicorr: LiLiCorrConfig | None = None

    @property
    def first(self) -> int:
        """The position of the block that proposes the token after the settled one."""
        return 0 if self.markov is not None or (self.domino is not None and self.domino.shifted) else 1

    @property
    def num_steps(self) -> int:
        """S"""
        return self.block_size - self.positions(0)

    def positions(self, num_steps: int) -> int:
        """Positions of a block that proposes so many tokens. Only DSpark's settled token needs none of its own."""
        return num_steps + (self.markov is None)


class DFlashDrafter(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.decoder.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden)
        self.layers = nn.ModuleList(DecoderLayer(config.decoder) for _ in range(config.decoder.num_layers))
        self.norm = nn.RMSNorm(hidden)
        markov = config.markov
        self.markov_head = MarkovHead(markov, config.decoder.vocab_size, hidden) if markov else None
        self.confidence_head = ConfidenceHead(hidden, markov.rank) if markov and config.confidence else None
        self.confidence_temperatures: tuple[float, ...] = ()
        domino = config.domino
        self.domino_head = DominoHead(domino, config.decoder.vocab_size, hidden) if domino else None
        self.candidate_selector = CandidateSelector(config.selector, config.decoder.vocab_size, hidden) \
            if config.selector else None
        self.lilicorr = LiLiCorrHead(config.lilicorr, config.num_steps, hidden, config.decoder.rms_eps) \
            if config.lilicorr else None
        if config.convolution is not None:
            for layer in self.layers:
                layer.attention_conv, layer.mlp_conv = (GroupedConvolution(*config.convolution, hidden)
                                                        for _ in range(2))

    @property
    def head(self) -> BlockHead | None:
        """What reads the drafted tokens."""
        return self.markov_head or self.domino_head

    def block_states(self, documents: PackedBatch, plan: UnrollPlan, rotary: Rotary, embed_VH: Tensor,
                     dtype: torch.dtype, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """[R, C, H]: the residual stream of every root's block after the last layer, before `norm`; and [R, H]: the
        features of the roots."""
        decoder, size = self.config.decoder, self.config.block_size
        around = None if self.config.convolution is None else Convolutions(dict(self.named_parameters()), size)
        # 1. Features of every settled position: fused and normalised once, read by all layers.
        aux_TC = documents.aux.flatten(-2)  # C = A * H
        features_TH = rms_norm(linear(aux_TC, self.fc.weight.to(dtype)).to(self.norm.weight.dtype),
                               self.hidden_norm.weight, decoder.rms_eps)
        at_T = rotary.at(plan.positions)
        positions_RC = plan.positions[plan.roots][:, None] + 1 + torch.arange(size)
        at_X = rotary.at(positions_RC.flatten())  # X = R * C
        # 2. The blocks: the known token after each root, then masks.
        tokens_RC = torch.full_like(positions_RC, self.config.mask_token_id)
        tokens_RC[:, 0] = documents.token_ids[plan.roots + 1]
        x_XH = F.embedding(tokens_RC.flatten(), embed_VH).to(self.norm.weight.dtype)
        # 3. The layers. Settled positions enter as keys and values alone; the residual stream is the block's.
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            weights, kernel = layer.weights(dtype), None
            shared = SharedKeys(plan, *weights.keys(features_TH, at_T))
            if around is None:
                heads = weights.heads(x_XH, at_X)
            else:
                normed_XH = rms_norm(x_XH, weights.input_layernorm, decoder.rms_eps)
                inner_XH, kernel = around.before(number, "attention", normed_XH)
                heads = weights.split(linear(inner_XH, weights.qkv), at_X)
            q_RCKWE, k_RCKE, v_RCKE = (part.unflatten(0, (-1, size)) for part in heads)
            attended_XQ = attend_block(q_RCKWE, shared, k_RCKE, v_RCKE).flatten(0, 1).flatten(1)
            if around is None or kernel is None:
                x_XH = weights.post_attention(x_XH, attended_XQ, recompute)
                continue
            x_XH = x_XH + around.after(linear(attended_XQ, weights.post_attention.out), kernel)
            inputs = (x_XH, weights.post_attention, around, number)
            x_XH = recomputed(_convolved_mlp, *inputs, use_reentrant=False) if recompute else _convolved_mlp(*inputs)
        return x_XH.unflatten(0, (-1, size)), features_TH[plan.roots]


def _convolved_mlp(x_XH: Tensor, after: PostAttention, around: Convolutions, layer: int) -> Tensor:
    """The MLP of a layer between its convolutions, on the residual stream."""
    inner_XH, kernel = around.before(layer, "mlp", rms_norm(x_XH, after.norm, after.rms_eps))
    gate, up = linear(inner_XH, after.gate_up).chunk(2, -1)
    return x_XH + around.after(linear(F.silu(gate) * up, after.down), kernel)


class BlockDiffusion(Objective[DFlashDrafter]):
    """Trains a DFlashDrafter on blocks after random anchors."""

    def __init__(self, drafter: DFlashDrafter, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                 dtype: torch.dtype) -> None:
        decoder, size = drafter.config.decoder, drafter.config.block_size
        super().__init__(drafter, decoder.vocab_size, embeddings.output_head, spec, steps=drafter.config.num_steps,
                         dtype=dtype)
        self._fraction = spec.unrolled_fraction
        self._embed_VH, self._head_VH, self._scale = embeddings.embed, embeddings.lm_head_as(dtype), embeddings.scale
        self._rotary = Rotary(decoder.rope, decoder.head_dim, max_positions + size)

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training a random fraction of the roots, each with its whole block; in evaluation all roots."""
        chosen = None
        if context is not None and self._fraction < 1.0:
            chosen = draw_positions(documents, context, self._fraction)
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps, chosen=chosen)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """One pass for all steps. Block positions after the end of the answer are computed and have no loss."""
        block_RCH, roots_RH = self.drafter.block_states(documents, plan, self._rotary, self._embed_VH, self.dtype,
                                                        self._recompute)
        config, head = self.drafter.config, self.drafter.head
        selector, lilicorr = self.drafter.candidate_selector, self.drafter.lilicorr
        # DFlash: mask s + 1 stands at the position of the token that step s proposes. Others: the one before it.
        predicted = torch.cat([block_RCH[:alive, step + config.first] for step, alive in enumerate(plan.alive)])
        states_NH = rms_norm(predicted, self.drafter.norm.weight, config.decoder.rms_eps)
        states = states_NH.split([alive for alive in plan.alive if alive])
        if head is None and (evaluating or (selector is None and lilicorr is None)):
            return Prediction(states, self._head_VH)
        previous, following = ([documents.token_ids[plan.roots[:alive] + step + more]
                                for step, alive in enumerate(plan.alive) if alive] for more in (1, 2))
        if selector is not None:
            return Prediction(states, self._head_VH, extra=selector.losses(
                states_NH, self._head_VH, self._scale, torch.cat(previous), torch.cat(following)))
        if lilicorr is not None:
            return Prediction(states, self._head_VH, extra=lilicorr.losses(
                states, following, roots_RH[:states[-1].shape[0]], self._head_VH, self._embed_VH))
        assert head is not None
        read, accepted = head.unroll(previous, states, self._embed_VH), None
        if self.drafter.confidence_head is not None and isinstance(head, MarkovHead):
            features = torch.cat([states_NH, head.markov_w1(torch.cat(previous))], 1)
            accepted = self.drafter.confidence_head.proj(features).squeeze(1)
        return Prediction(tuple(torch.cat([state, z], 1) for state, z in zip(states, read, strict=True)),
                          torch.cat([self._head_VH, head.bias_VM.to(self.dtype)], 1), accepted=accepted,
                          base=None if config.domino is None else (states_NH, self._head_VH))

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        self.drafter.confidence_temperatures = temperatures

    def base_share(self, context: StepContext) -> float:
        return 0.0 if self.drafter.config.domino is None else base_share(context)

    def flops(self, plan: UnrollPlan) -> int:
        """The features of every token, the layers at every block position, the output matrix at the predictions."""
        decoder, size, num_roots = self.drafter.config.decoder, self.drafter.config.block_size, plan.roots.numel()
        num_tokens, kv = plan.positions.numel(), decoder.num_kv_heads * decoder.head_dim
        num_visible = size * (int(plan.positions[plan.roots].sum()) + num_roots * (1 + size))
        context = 4 * num_tokens * self.drafter.fc.weight.numel() + decoder.num_layers * (
            12 * num_tokens * decoder.hidden_size * kv)
        heads = (4 * plan.num_predictions + 2 * plan.target_positions.numel()) * decoder.hidden_size
        if (head := self.drafter.head) is not None:
            rank = head.bias_VM.shape[1]
            heads += 6 * plan.num_predictions * rank
            if self.drafter.config.confidence and self.loss_kind != "tv":  # acceptance, which other losses do not give
                heads += 2 * plan.num_predictions * (decoder.hidden_size + rank)
        scored = num_roots * size * sum(parameter.numel() for name, parameter in self.drafter.named_parameters()
                                        if name.endswith("kernel_projection.weight"))
        if self.drafter.candidate_selector is not None or self.drafter.lilicorr is not None:  # the candidates
            heads += 2 * plan.num_predictions * decoder.hidden_size
        if (lilicorr := self.drafter.lilicorr) is not None and len(plan.alive) == self.steps:
            scored += plan.alive[-1] * self.steps * lilicorr.config.candidate_topk * sum(
                parameter.numel() for parameter in lilicorr.parameters())
        return (context + decoder.num_layers * layer_flops(decoder, num_roots * size, num_visible)
                + heads * decoder.vocab_size + 6 * scored)


@dataclass
class DFlashState:
    """Keys of every row's features in all layers, and its last settled token."""

    cache: DrafterKVCache
    last: list[int]
    features_RH: Tensor
    """Of its last settled position; LiLiCorr alone reads them."""


class _Features:
    """Aux states to keys and values of all layers: `fc`, then one product for all layers, in the layout of
    `targets.model`."""

    def __init__(self, config: DFlashConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        decoder = config.decoder
        self._decoder = decoder
        self._fc, self._norm_H = Linear(tensors["fc.weight"].to(dtype)), tensors["hidden_norm.weight"]
        attention, kv = "layers.{}.self_attn.{}.weight", []
        for layer in range(decoder.num_layers):
            kv += [pairs_together(tensors[attention.format(layer, "k_proj")], decoder.head_dim),
                   tensors[attention.format(layer, "v_proj")]]
        # The norm's weight is folded into what follows it.
        self._kv = Linear((torch.cat(kv).float() * tensors["hidden_norm.weight"].float()).to(dtype))
        self._k_norm_LE = torch.stack([pairs_together(tensors[attention.format(layer, "k_norm")], decoder.head_dim)
                                       for layer in range(decoder.num_layers)]).float()
        self._eps, self._head_eps = (torch.tensor(decoder.rms_eps, dtype=kind) for kind in (dtype, torch.float32))
        self._frequencies = torch.tensor(decoder.rope.inverse_frequencies(decoder.head_dim), dtype=torch.float64)

    def fused(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] -> [T, H]"""
        return F.rms_norm(self._fc(aux_TAH.flatten(1)), self._norm_H.shape, self._norm_H, float(self._head_eps))

    def keys(self, aux_TAH: Tensor, positions_T: Tensor) -> Tensor:
        """[T, A, H] -> [T, L, 2K, E]: rotated keys, then values."""
        decoder, num_tokens = self._decoder, aux_TAH.shape[0]
        features_TH = rms_normalise(self._fc(aux_TAH.flatten(1)), self._eps)
        kv = self._kv(features_TH).view(num_tokens, decoder.num_layers, 2 * decoder.num_kv_heads, decoder.head_dim)
        keys = rms_normalise(kv[:, :, : decoder.num_kv_heads].float(), self._head_eps) * self._k_norm_LE[:, None]
        angles = positions_T.to(torch.float64)[:, None] * self._frequencies
        rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        torch.view_as_complex(keys.unflatten(-1, (-1, 2))).mul_(rotations[:, None, None])
        kv[:, :, : decoder.num_kv_heads] = keys.to(kv.dtype)  # normed and rotated in float32, stored as the cache is
        return kv


class DFlashProposer:
    """`speculation.protocol.Drafter`: a DFlashDrafter with its target's embedding and output matrix."""

    def __init__(self, drafter: DFlashDrafter, target: TargetModel) -> None:
        """Converts the parameters of `drafter` to the target's dtype, on its device."""
        config = self._config = drafter.config
        tensors = {name: tensor.to(target.device, target.dtype) for name, tensor in drafter.state_dict().items()}
        drafter.load_state_dict(tensors, assign=True)
        self._target, self._features = target, _Features(config, tensors, target.dtype)
        self._head, self._candidates = drafter.head, drafter.candidate_selector or drafter.lilicorr
        if self._head is not None:
            self._bias = Linear(self._head.bias_VM)
        body = {f"model.{name}": tensor for name, tensor in tensors.items() if not name.startswith(_HEADS)}
        self._convolutions = None if config.convolution is None else Convolutions(tensors, config.block_size)
        self._model = TargetModel(config.decoder, body | {"model.embed_tokens.weight": target.embed_weight}, head=False,
                                  around=self._convolutions)
        self.aux_layers, self.max_length = config.aux_layers, config.decoder.max_position_embeddings

    def new_state(self, num_rows: int) -> DFlashState:
        decoder, dtype = self._config.decoder, self._model.dtype
        return DFlashState(DrafterKVCache(decoder, decoder.num_layers, num_rows, dtype), [0] * num_rows,
                           torch.zeros(num_rows, decoder.hidden_size, dtype=dtype))

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        assert isinstance(state, DFlashState)
        state.cache.settled[row] = 0

    @torch.inference_mode()
    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Write the keys and values of the pairs' features; attention and MLP are not run."""
        assert isinstance(state, DFlashState)
        chosen, num_pairs = RowLengths.of(pairs.rows, pairs.starts), pairs.aux.shape[1]
        index_BT = chosen.lengths_B1 + torch.arange(num_pairs)  # also the positions
        kv = self._features.keys(pairs.aux.flatten(0, 1).to(self._model.dtype), index_BT.flatten())
        state.cache.reserve(max(pairs.starts) + num_pairs)
        for layer, of_layer in enumerate(kv.unflatten(0, (-1, num_pairs)).unbind(2)):
            state.cache.write(layer, chosen, of_layer)
        for row, settled, tokens in zip(pairs.rows, pairs.ends, pairs.tokens, strict=True):
            state.cache.settled[row], state.last[row] = settled, tokens[-1]
        if isinstance(self._candidates, LiLiCorrHead):
            last_BAH = torch.stack([aux[len(tokens) - 1] for aux, tokens in zip(pairs.aux, pairs.tokens, strict=True)])
            state.features_RH[list(pairs.rows)] = self._features.fused(last_BAH.to(self._model.dtype))

    @torch.inference_mode()
    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One pass over the block of each row, and the tree of its marginals; with a head one that grows by token. Of a
        draft less deep than the trained block the positions behind it are not computed, as in SGLang."""
        assert isinstance(state, DFlashState)
        size = min(self._config.block_size, self._config.positions(shape.num_steps))
        if self._convolutions is not None:
            self._convolutions.block_size = size
        chosen = RowLengths.of(rows, [state.cache.settled[row] for row in rows])
        tokens_BC = upload([[state.last[row], *[self._config.mask_token_id] * (size - 1)] for row in rows])
        positions_BC = chosen.lengths_B1 + torch.arange(size)
        attend = NewTokens(state.cache, chosen, size, all_scratch_mask(chosen, size, size))
        _, states = self._model.run(tokens_BC.flatten(), positions_BC.flatten(), attend)
        first = self._config.first
        states_BSH = states.unflatten(0, (-1, size))[:, first:first + min(shape.num_steps, self._config.num_steps)]
        logits_BSV, head = self._target.logits(states_BSH), self._head
        if self._candidates is not None:
            steps = self._candidates.steps(states_BSH, logits_BSV / self._target.config.logit_scale,
                                           state.features_RH[list(rows)], self._target.embed_weight)
            return build_limited_tree(steps(tokens_BC[:, :1], 0), lambda tokens, hidden, mask, depth: steps(
                tokens, depth), shape, states_BSH.shape[1], None, noise)
        if head is None:
            return build_tree_from_marginals(logits_BSV, shape, None, noise)

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor | None, depth: int) -> DraftStep:
            """`protocol.StepFunction`: children of nodes of one depth; their state is the head's memory."""
            rows, nodes = tokens.shape
            state_RH = states_BSH[:, depth, None].expand(-1, nodes, -1).flatten(0, 1)
            z_RM, memory_RM = head.step(tokens.flatten(), state_RH, hidden.flatten(0, 1), depth,
                                        self._target.embed_weight)
            return DraftStep(logits_BSV[:, depth, None] + self._bias(z_RM).view(rows, nodes, -1),
                             memory_RM.view(rows, nodes, head.state_size))

        root = step(tokens_BC[:, :1], states_BSH.new_zeros(len(rows), 1, head.state_size), None, 0)
        return build_limited_tree(root, step, shape, states_BSH.shape[1], None, noise)


def create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, layers: tuple[int, ...],
           _vocabulary: DraftVocabulary, seed: int) -> DFlashDrafter:
    assert spec.max_draft_tokens is not None
    if min(layers) < 1 or max(layers) >= target.num_layers:
        raise InvalidInput(f"a {spec.family} drafter cannot read layers {list(layers)}: SGLang captures outputs of "
                           "layers", f"give capture.aux_layers between 1 and {target.num_layers - 1}")
    num_layers = spec.num_layers or max(1, min(_MAX_LAYERS, target.num_layers // _TARGET_LAYERS_PER_LAYER))
    decoder = decoder_config(spec, target, "qwen3", num_layers, qk_norm=True)
    markov = None
    if spec.family == "dspark":
        markov = MarkovConfig(spec.markov_head or "vanilla", markov_rank(target.hidden_size, spec.markov_rank))
    domino = DominoConfig(*domino_sizes(target.hidden_size)) if spec.causal_head == "domino" else None
    selector = SelectorConfig(CANDIDATES, markov_rank(target.hidden_size, None), target.logit_scale, None) \
        if spec.causal_head in ("selector", "dflash2") else None
    convolution = convolution_sizes(target.hidden_size) if spec.causal_head == "dflash2" else None
    lilicorr = None
    if spec.causal_head == "lilicorr":
        if target.logit_scale != 1.0 or target.logit_soft_cap is not None:
            raise InvalidInput("drafter.causal_head is lilicorr, and the target scales or bounds its logits: in SGLang "
                               "the head reads logits without either", "train another head")
        width = lilicorr_width(target.hidden_size)
        lilicorr = LiLiCorrConfig(width, width)
    drafter = DFlashDrafter(DFlashConfig(decoder, spec.max_draft_tokens + (markov is None), layers, target.num_layers,
                                         mask_token(embeddings.special, target), markov, markov is not None, domino,
                                         selector, convolution, lilicorr))
    initialise_parameters(drafter, seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():  # the marginals alone, each accepted with probability 1/2
            if name.startswith("confidence_head.") or name.endswith(("bias", "slot_embedding", "rank_embedding")):
                parameter.zero_()
            elif name.endswith("base_kernel"):
                parameter.zero_()[:, 0] = 1.0
        if drafter.head is not None:
            drafter.head.bias_VM.zero_()
        if drafter.candidate_selector is not None:
            drafter.candidate_selector.successor_codebook.zero_()
        drafter.norm.weight.copy_(embeddings.norm)  # the target's output matrix reads states after this norm
    return drafter


def mask_token(special: Sequence[int], target: TargetConfig) -> int:
    """The mask token: the last special token that does not end answers, or the last id."""
    unused = [token for token in special if token not in target.eos_token_ids and token < target.vocab_size]
    return max(unused, default=target.vocab_size - 1)


def save(directory: Path, drafter: DFlashDrafter, dtype: str, card: Card | None) -> None:
    config = drafter.config
    head: dict[str, Any] = {} if config.markov is None else {
        "markov_head_type": config.markov.kind, "markov_rank": config.markov.rank,
        "enable_confidence_head": config.confidence, "confidence_head_with_markov": config.confidence}
    if drafter.confidence_temperatures:
        head["eyrie"] = {"confidence_temperatures": list(drafter.confidence_temperatures)}
    causal = {} if config.domino is None else {
        "projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": config.domino.shifted,
        "gru_hidden_dim": config.domino.state_size, "emb_dim": config.domino.rank}
    if config.selector is not None:
        causal = config.selector.json()
    elif config.lilicorr is not None:
        causal = config.lilicorr.json()
    if config.convolution is not None:
        causal |= dict(zip(("conv_kernel_size", "conv_group_size"), config.convolution, strict=True))
    architecture = (DFLASH2 if config.selector else LILICORR if config.lilicorr else
                    FAMILIES["dflash" if config.markov is None else "dspark"].architecture)
    written = decoder_json(config.decoder, architecture, dtype) | head | {
        "block_size": config.block_size, "num_target_layers": config.num_target_layers,
        "layer_types": list(config.decoder.layer_types), "use_sliding_window": False,
        "dflash_config": {
            "block_size": config.block_size, "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": [layer - 1 for layer in config.aux_layers], **causal}}  # "output of layer v", from 0
    tensors = {name.removeprefix(_DOMINO_HEAD): tensor for name, tensor in drafter.state_dict().items()}
    checkpoint.write_checkpoint(directory, written, checkpoint.as_stored(tensors, dtype), card)


def load(directory: Path, target: TargetConfig | None = None) -> DFlashDrafter:
    """The drafter of an export, for this target if one is given. Raises ArtifactMissing, CheckpointInvalid."""
    is_dspark = checkpoint.read_config(directory).get("architectures") == [FAMILIES["dspark"].architecture]
    family = "dspark" if is_dspark else "dflash"
    written, decoder, tensors = checkpoint.read_checkpoint(directory, family, target)
    own = written["dflash_config"]
    markov = MarkovConfig(written["markov_head_type"], written["markov_rank"]) if family == "dspark" else None
    config = DFlashConfig(decoder, own["block_size"], tuple(layer + 1 for layer in own["target_layer_ids"]),
                          own["num_target_layers"], own["mask_token_id"], markov,
                          bool(written.get("enable_confidence_head")),
                          DominoConfig(own["gru_hidden_dim"], own["emb_dim"], own["shift_label"])
                          if "gru_hidden_dim" in own else None,
                          SelectorConfig.of(own) if "selector_top_k" in own else None,
                          (own["conv_kernel_size"], own["conv_group_size"]) if own.get("conv_kernel_size") else None,
                          LiLiCorrConfig.of(own) if "lilicorr_hidden_size" in own else None)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    drafter.load_state_dict({(_DOMINO_HEAD if name.startswith(_DOMINO) else "") + name: tensor
                             for name, tensor in tensors.items()}, assign=True)
    return drafter

"""EAGLE-3 as a family: a new drafter, its checkpoints in the format of SGLang and vLLM, and decoding with it.

The contract of a checkpoint's directory is `drafters.eagle3.directory`: saving and loading refuse a drafter with
errors. Training is in `drafters.eagle3.drafter`; `drafters.layer_proposer` runs the layer in decoding, with the
matrices packed as `Eagle3Proposer` does.

The engines number aux layers differently. Eyrie uses the index into Hugging Face `hidden_states` (0 = embeddings).
SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids`, for most targets as "output of layer v": index - 1. vLLM
reads the key of the same name at the top level, as "input of layer k": index. The config contains both.

    T rows, A aux layers, H hidden, Q = q + k + v widths, D draft vocabulary, V vocabulary
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.drafter_rules import LAYER_IDS
from eyrie_api.planning.eagle3_rules import ARCHITECTURE, MAPS, aux_layers, canonical_name, own_engine_rules, shape_of
from eyrie_api.planning.sglang_support import sglang_layer_ids
from eyrie_workers.drafters import checkpoint, layer_proposer
from eyrie_workers.drafters.card import Card, TargetIdentity, read_card
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.decoder import head_counts
from eyrie_workers.drafters.eagle3.directory import validate
from eyrie_workers.drafters.eagle3.drafter import (
    Eagle3Config,
    Eagle3Drafter,
    TrainingTimeTest,
    initialise_from_target,
    trained_drafter,
)
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.validation import ValidationRequest
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import Linear, rms_normalise


def save_drafter(directory: Path, drafter: Eagle3Drafter, dtype: str = "float32", card: Card | None = None) -> None:
    """Write a drafter to `directory`, replacing an existing one, atomically. Raises CheckpointInvalid before writing.

    card   its provenance; names the target architecture that the layer ids are written for. None: no card is written.
    """
    whole = drafter.config.draft_vocab_size == drafter.config.vocab_size  # vLLM then refuses the maps
    tensors = checkpoint.as_stored({name: tensor for name, tensor in drafter.state_dict().items()
                                    if not (whole and name in MAPS)}, dtype)
    config = config_json(drafter.config, dtype, card.target if card else None)
    checkpoint.refuse(directory.name, validate(ValidationRequest(config, tensors, card)))
    checkpoint.write_checkpoint(directory, config, tensors, card)


def load_drafter(directory: Path, target: TargetConfig | None = None) -> Eagle3Drafter:
    """Read and validate a drafter, for this target if one is given. Raises ArtifactMissing when a file is missing,
    CheckpointInvalid when it breaks the contract or is a variant Eyrie's engine does not compute."""
    config, stored = checkpoint.read_config(directory), checkpoint.read_tensors(directory)
    checkpoint.refuse(directory.name, validate(ValidationRequest(config, stored, read_card(directory))))
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
    parsed = parse_config(config)
    ids = tensors["d2t"] + torch.arange(parsed.draft_vocab_size) if "d2t" in tensors else torch.arange(
        parsed.vocab_size)
    vocabulary = DraftVocabulary(ids, parsed.vocab_size)
    drafter = Eagle3Drafter(parsed, vocabulary)
    drafter.to(tensors["fc.weight"].dtype)  # all parameters have one: the validator checks it
    tensors.pop("embed_tokens.weight", None)  # decoding uses the target's, as the engines do
    drafter.load_state_dict(tensors | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, strict=True)
    if target is not None:
        checkpoint.refuse_another_target(str(directory), "eagle3", config, target)
    return drafter


def config_json(config: Eagle3Config, dtype: str, target: TargetIdentity | None = None) -> dict[str, Any]:
    """The `config.json` of a drafter for a target; without one, with the layer ids of most architectures. Raises
    InvalidInput when SGLang cannot capture these layers for this target."""
    eos = list(config.eos_token_ids)
    ids = [layer - 1 for layer in config.aux_layers] if target is None else list(
        sglang_layer_ids(target.architecture, target.num_layers, config.aux_layers))
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size, "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_eps, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_theta": config.rope.theta, "rope_parameters": checkpoint.rope_json(config.rope),
        "num_aux_hidden_states": config.num_aux, LAYER_IDS: list(config.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: ids},  # as SGLang numbers them
        "norm_before_residual": False,  # SGLang always adds the state before its norm
        "bos_token_id": config.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype, "dtype": dtype,
    }
    if config.rope.kind != "default":
        written["rope_scaling"] = checkpoint.rope_json(config.rope)
    for flag in ("fc_norm", "norm_output"):
        if getattr(config, flag):
            written[flag] = True
    if config.norm_before_fc:  # SGLang and vLLM read the inner key first; trainers read the outer
        written["norm_before_fc"] = written["eagle_config"]["norm_before_fc"] = True
    if config.sliding_window is not None:
        written |= {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"]}
    return written


def parse_config(written: Mapping[str, Any]) -> Eagle3Config:
    """An `Eagle3Config` from a `config.json` without errors. Raises CheckpointInvalid for variants that Eyrie's engine
    does not compute."""
    for fault in own_engine_rules(written):
        raise CheckpointInvalid(fault.what, fault.hint)
    shape = shape_of(written)
    decoder = checkpoint.parse_decoder("checkpoint", written)
    return Eagle3Config(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size, aux_layers=aux_layers(written), rms_eps=decoder.rms_eps,
        rope=decoder.rope, max_position_embeddings=decoder.max_position_embeddings,
        eos_token_ids=decoder.eos_token_ids, bos_token_id=written.get("bos_token_id"), fc_norm=shape.fc_norm,
        norm_before_fc=shape.norm_before_fc, norm_output=bool(written.get("norm_output", False)),
        sliding_window=written.get("sliding_window"))


class Eagle3Proposer(layer_proposer.LayerProposer):
    """An Eagle3Drafter with its target's embedding, for decoding: the matrices with norms folded in, in the order a
    step uses them."""

    @torch.inference_mode()
    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor) -> None:
        """`embed_VH` is the target's embedding [V, H]; drafting computes in its dtype."""
        weights, config, dtype = drafter.weights(torch.float32), drafter.config, embed_VH.dtype
        super().__init__(config, config.aux_layers, dtype, weights.post_attention,
                         layer_proposer.target_ids(drafter.vocabulary, embed_VH.device))
        self._fc_norm = torch.stack(weights.fc_norm).to(dtype) if weights.fc_norm else None  # folded in float32
        self._norm_before_fc = weights.input_norm is not None
        self._fc = Linear((weights.fc if weights.input_norm is None else weights.fc * weights.input_norm).to(dtype))
        hidden_qkv, embed_qkv = (self.adjacent_pairs(matrix * norm) for matrix, norm in (
            (weights.hidden_qkv, weights.hidden_norm), (weights.embed_qkv, weights.input_layernorm)))
        self._hidden_qkv, self._embed_qkv = Linear(hidden_qkv.to(dtype)), Linear(embed_qkv.to(dtype))
        self._norm = weights.norm.detach().to(dtype) if config.norm_output else None
        self._lm_head = Linear((weights.lm_head * weights.norm).to(dtype))
        self._token_qkv = layer_proposer.token_projection(
            embed_VH, lambda embed_TH: self._embed_qkv(rms_normalise(embed_TH, self._eps)), embed_qkv.shape[0])

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        aux_TAH = aux_TAH.to(self._dtype)
        if self._fc_norm is not None:
            aux_TAH = rms_normalise(aux_TAH, self._eps) * self._fc_norm
        concatenated_TC = aux_TAH.flatten(-2)
        return self._fc(rms_normalise(concatenated_TC, self._eps) if self._norm_before_fc else concatenated_TC)

    def enter(self, hidden_TH: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """The state unchanged [T, H], and q, k, v [T, Q]"""
        return hidden_TH, self._hidden_qkv.add(rms_normalise(hidden_TH, self._eps), self._token_qkv(tokens_T))

    def predict(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_normalise(hidden_TH, self._eps)
        return self._lm_head(normed), hidden_TH if self._norm is None else normed * self._norm


def _create(spec: DrafterSpec, target: TargetConfig, embeddings: TargetEmbeddings, aux_layers: Layers,
            vocabulary: DraftVocabulary, seed: int) -> nn.Module:
    if len(aux_layers) < 2:
        # SGLang distinguishes the target's states from the drafter's own by their width, and skips `fc` and its norms
        # when the widths are equal: with one aux layer they always are.
        raise InvalidInput(f"an eagle3 drafter cannot read {len(aux_layers)} aux layer: SGLang would skip its fc",
                           "give capture.aux_layers two or more")
    num_heads, num_kv_heads = head_counts(spec, target, target.num_heads)
    drafter = Eagle3Drafter(Eagle3Config(
        hidden_size=target.hidden_size, intermediate_size=spec.intermediate_size or target.intermediate_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=target.head_dim, vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size, aux_layers=aux_layers, rms_eps=target.rms_eps, rope=target.drafter_rope,
        max_position_embeddings=spec.max_position_embeddings or target.max_position_embeddings,
        eos_token_ids=target.eos_token_ids, fc_norm=spec.fc_norm, norm_before_fc=spec.norm_before_fc,
        norm_output=spec.norm_output, sliding_window=spec.sliding_window), vocabulary)
    initialise_from_target(drafter, embeddings, seed)
    return drafter


FAMILY = FamilyImplementation(
    "eagle3", _create, TrainingTimeTest, save_drafter, load_drafter,
    lambda drafter, target: Eagle3Proposer(drafter, target.embed_weight), validate,
    trained=lambda drafter: trained_drafter(drafter.config), learning_rate=2e-3)

"""EAGLE-3's row in the table of families."""

from pathlib import Path

import torch
from torch import nn

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.checkpoint.files import CheckpointInvalid
from eyrie_workers.drafters.eagle3.checkpoint import load_drafter, save_drafter
from eyrie_workers.drafters.eagle3.directory_format import ARCHITECTURE
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.objective import TrainingTimeTest
from eyrie_workers.drafters.eagle3.validation import examine
from eyrie_workers.drafters.family import Family
from eyrie_workers.drafters.initialisation import TargetEmbeddings, inherit
from eyrie_workers.drafters.layers.serving import Eagle3Server
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import Objective


def _create(spec: DrafterSpec, target: TargetConfig, ends: TargetEmbeddings, aux_layers: tuple[int, ...],
                   vocabulary: DraftVocabulary, seed: int) -> nn.Module:
    if len(aux_layers) < 2:
        # SGLang tells a target's states from the drafter's own by their width, and skips `fc` and its norms when the
        # two agree: with one aux layer they always do.
        raise InvalidInput(f"an eagle3 drafter cannot read {len(aux_layers)} aux layer: SGLang would skip its fc",
                           "give capture.aux_layers two or more")
    num_heads = spec.num_attention_heads or target.num_heads
    # As many queries per key-value head as the target has, as far as the number of heads allows.
    num_kv_heads = target.num_kv_heads if spec.num_attention_heads is None else max(
        divisor for divisor in range(1, num_heads + 1)
        if num_heads % divisor == 0 and divisor <= max(1, num_heads * target.num_kv_heads // target.num_heads))
    drafter = Eagle3Drafter(Eagle3Config(
        hidden_size=target.hidden_size, intermediate_size=spec.intermediate_size or target.intermediate_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=target.head_dim, vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary.size, aux_layers=aux_layers, rms_eps=target.rms_eps, rope=target.rope,
        max_position_embeddings=spec.max_position_embeddings or target.max_position_embeddings,
        eos_token_ids=target.eos_token_ids, fc_norm=spec.fc_norm, norm_before_fc=spec.norm_before_fc,
        norm_output=spec.norm_output, sliding_window=spec.sliding_window), vocabulary)
    inherit(drafter, ends, seed)
    return drafter


def _objective(drafter: Eagle3Drafter, ends: TargetEmbeddings, spec: TrainSpec, max_positions: int,
                      dtype: torch.dtype) -> Objective:
    return TrainingTimeTest(drafter, ends.embed, ends.lm_head, spec, max_positions=max_positions, dtype=dtype)


def _save(directory: Path, drafter: Eagle3Drafter, dtype: str, card: Card | None) -> None:
    save_drafter(directory, drafter, dtype=dtype, card=card)


def _serve(directory: Path, target: TargetModel) -> Drafter:
    drafter = load_drafter(directory)
    wanted, got = (target.config.hidden_size, target.config.vocab_size), (drafter.config.hidden_size,
                                                                        drafter.config.vocab_size)
    if wanted != got:
        raise CheckpointInvalid(f"drafter {directory} is for a target of hidden size {got[0]} and vocabulary {got[1]}, "
                                f"this target has {wanted[0]} and {wanted[1]}", "serve it with its own target")
    return Eagle3Server(drafter, target.embed_weight)


FAMILY = Family("eagle3", ARCHITECTURE, _create, _objective, _save, _serve, examine, learning_rate=2e-3)

"""The implementation of the EAGLE-3 family."""

from pathlib import Path

import torch
from torch import nn

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.checkpoint.files import refuse_other_sizes
from eyrie_workers.drafters.eagle3.checkpoint import load_drafter, save_drafter
from eyrie_workers.drafters.eagle3.flops import trained_drafter
from eyrie_workers.drafters.eagle3.initialisation import initialise_from_target
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.objective import TrainingTimeTest
from eyrie_workers.drafters.eagle3.proposer import Eagle3Proposer
from eyrie_workers.drafters.eagle3.validation import validate
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.drafters.layers.decoder import head_counts
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import Objective


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


def _objective(drafter: Eagle3Drafter, embeddings: TargetEmbeddings, spec: TrainSpec, max_positions: int,
               dtype: torch.dtype) -> Objective:
    return TrainingTimeTest(drafter, embeddings.embed, embeddings.output_head, spec, max_positions=max_positions,
                            dtype=dtype)


def _save(directory: Path, drafter: Eagle3Drafter, dtype: str, card: Card | None) -> None:
    save_drafter(directory, drafter, dtype=dtype, card=card)


def _load_proposer(directory: Path, target: TargetModel) -> Drafter:
    drafter = load_drafter(directory)
    refuse_other_sizes(directory, drafter.config.hidden_size, drafter.config.vocab_size, target.config)
    return Eagle3Proposer(drafter, target.embed_weight)


FAMILY = FamilyImplementation("eagle3", _create, _objective, _save, _load_proposer, validate,
                              trained=lambda drafter: trained_drafter(drafter.config), load=load_drafter,
                              learning_rate=2e-3)

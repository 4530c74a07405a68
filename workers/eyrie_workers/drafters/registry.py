"""The table of drafter families: how each is made, trained, written and served. Stages name none of them.

A family is a row of functions. Adding one means a file for its architecture, an objective, and a row here. A family
that is not trained has neither checkpoint nor objective: a function that makes the drafter, in a table of its own.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.job import DrafterSpec, TrainSpec
from eyrie_workers.drafters.card import Card
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, load_drafter, read_config, save_drafter
from eyrie_workers.drafters.contract import ARCHITECTURE
from eyrie_workers.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.inheritance import TargetEnds, inherit
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.drafters.protocol import Drafter
from eyrie_workers.drafters.serving import Eagle3Server
from eyrie_workers.drafters.vocabulary import DraftVocabulary
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import Objective, TrainingTimeTest


@dataclass(frozen=True)
class Family:
    """One family of drafters."""

    name: str
    architecture: str
    """`architectures[0]` of its checkpoints' config.json: how a directory tells what it holds."""

    create: Callable[[DrafterSpec, TargetConfig, TargetEnds, tuple[int, ...], DraftVocabulary, int], nn.Module]
    """A new drafter: (spec, target, target's ends, aux layers, draft vocabulary, seed)."""

    objective: Callable[[Any, TargetEnds, TrainSpec, int, torch.dtype], Objective]
    """How it learns: (drafter, target's ends, spec, longest document, arithmetic)."""

    save: Callable[[Path, Any, str, Card | None], None]
    """Export: (directory, drafter, dtype, card)."""

    serve: Callable[[Path, TargetModel], Drafter]
    """Load an export for the engine: (directory, target)."""


def _create_eagle3(spec: DrafterSpec, target: TargetConfig, ends: TargetEnds, aux_layers: tuple[int, ...],
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


def _objective_eagle3(drafter: Eagle3Drafter, ends: TargetEnds, spec: TrainSpec, max_positions: int,
                      dtype: torch.dtype) -> Objective:
    return TrainingTimeTest(drafter, ends.embed, ends.lm_head, ttt_length=spec.ttt_length, step_decay=spec.step_decay,
                            max_positions=max_positions, unrolled_fraction=spec.unrolled_fraction,
                            single_step_ratio=spec.single_step_ratio, dtype=dtype, loss=spec.loss,
                            normalisation=spec.normalisation, recompute=spec.grad_checkpoint)


def _save_eagle3(directory: Path, drafter: Eagle3Drafter, dtype: str, card: Card | None) -> None:
    save_drafter(directory, drafter, dtype=dtype, card=card)


def _serve_eagle3(directory: Path, target: TargetModel) -> Drafter:
    drafter = load_drafter(directory)
    wanted, got = (target.config.hidden_size, target.config.vocab_size), (drafter.config.hidden_size,
                                                                        drafter.config.vocab_size)
    if wanted != got:
        raise CheckpointInvalid(f"drafter {directory} is for a target of hidden size {got[0]} and vocabulary {got[1]}, "
                                f"this target has {wanted[0]} and {wanted[1]}", "serve it with its own target")
    return Eagle3Server(drafter, target.embed_weight)


FAMILIES: dict[str, Family] = {
    family.name: family for family in (
        Family("eagle3", ARCHITECTURE, _create_eagle3, _objective_eagle3, _save_eagle3, _serve_eagle3),
    )
}


UNTRAINED: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""`Setting.method` -> a drafter that needs no checkpoint."""


def family_named(name: str) -> Family:
    """The family of a `DrafterSpec.family`. Raises InvalidInput for an unknown one."""
    if name not in FAMILIES:
        raise InvalidInput(f"drafter.family {name!r} is not known", f"use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def open_drafter(directory: Path, target: TargetModel) -> Drafter:
    """Load the drafter in `directory`, of whatever family, ready for the engine.

    Raises ArtifactMissing without one, CheckpointInvalid when it is damaged, of no known family or for another target.
    """
    architectures = read_config(directory).get("architectures")
    for family in FAMILIES.values():
        if architectures == [family.architecture]:
            return family.serve(directory, target)
    raise CheckpointInvalid(f"{directory} holds a drafter of architecture {json.dumps(architectures)}",
                            f"use one of {', '.join(family.architecture for family in FAMILIES.values())}")


def open_method(method: str, directory: Path | None, target: TargetModel) -> Drafter | None:
    """The drafter of a `Setting.method`: the one in `directory`, an untrained one, or none for `off`.

    Raises InvalidInput for a method that is not known or lacks its directory, and what `open_drafter` raises.
    """
    if method == "off":
        return None
    if method in UNTRAINED:
        return UNTRAINED[method]()
    if method != "drafter":
        raise InvalidInput(f"method {method!r} is not known", f"use drafter, {', '.join(UNTRAINED)} or off")
    if directory is None:
        raise InvalidInput("method 'drafter' has no drafter directory", "name it, or use another method")
    return open_drafter(directory, target)

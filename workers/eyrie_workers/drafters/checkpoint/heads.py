"""Drafters that are heads on the target's last state, on disk: what Medusa's and Hydra's directories have in common.

The keys are those of vLLM's `MedusaConfig` (`transformers_utils/configs/medusa.py`) and mean the same for both:

    hidden_size, vocab_size   the target's
    truncated_vocab_size      draft vocabulary; smaller than vocab_size only with a tensor `token_map`
    num_heads                 tokens looked ahead
    num_hidden_layers         of each head; always 1
    original_lm_head          one output matrix for all heads in place of one each
    medusa_fc_bias            always false: the heads have no biases

    token_map [D] int64       target id of each draft id, ascending

Reading is strict: every key must be there and every tensor have its shape, one floating-point type and finite numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyrie_workers.drafters.checkpoint.card import Card, read_card
from eyrie_workers.drafters.checkpoint.files import (
    CheckpointInvalid,
    as_stored,
    exact_tensors,
    read_config,
    read_tensors,
    write_checkpoint,
)
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

TOKEN_MAP = "token_map"

_EXPORT_AGAIN = "export the drafter again"


@dataclass(frozen=True)
class HeadsConfig:
    """The numbers that decide which tensors there are."""

    hidden_size: int
    """The target's."""

    vocab_size: int
    """The target's."""

    draft_vocab_size: int
    num_heads: int


@dataclass(frozen=True)
class HeadsForm:
    """What is the same for all drafters of a family."""

    family: str
    architecture: str
    shared_output: bool
    """One output matrix for all heads."""

    shapes: Callable[[HeadsConfig], Mapping[str, tuple[int, ...]]]
    """Names and shapes of the tensors, `token_map` apart."""


@dataclass(frozen=True)
class StoredHeads:
    """A directory that was read and found whole."""

    config: HeadsConfig
    vocabulary: DraftVocabulary
    tensors: dict[str, Tensor]


def save_heads(directory: Path, form: HeadsForm, config: HeadsConfig, vocabulary: DraftVocabulary,
               tensors: Mapping[str, Tensor], dtype: str, card: Card | None) -> None:
    """Write a drafter to `directory`, replacing what is there, atomically."""
    stored = as_stored(tensors, dtype)
    if config.draft_vocab_size < config.vocab_size:
        stored |= as_stored({TOKEN_MAP: vocabulary.ids}, dtype)
    write_checkpoint(directory, {
        "architectures": [form.architecture], "model_type": form.family,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size, "num_heads": config.num_heads,
        "num_hidden_layers": 1, "original_lm_head": form.shared_output, "medusa_fc_bias": False,
        "torch_dtype": dtype, "dtype": dtype}, stored, card)


def load_heads(directory: Path, form: HeadsForm, target: TargetConfig | None) -> StoredHeads:
    """Read a drafter, for `target` when there is one. Raises ArtifactMissing without its files, CheckpointInvalid
    naming what is wrong with them."""
    found, tensors = read_config(directory), read_tensors(directory)
    config = HeadsConfig(*(_number(directory, found, key) for key in (
        "hidden_size", "vocab_size", "truncated_vocab_size", "num_heads")))
    for key, ours in (("architectures", [form.architecture]), ("num_hidden_layers", 1),
                      ("original_lm_head", form.shared_output), ("medusa_fc_bias", False)):
        if found.get(key) != ours:
            raise _invalid(directory, f"{key} is {found.get(key)!r}; Eyrie's {form.family} drafters have {ours!r}")
    if config.draft_vocab_size > config.vocab_size:
        raise _invalid(directory, f"truncated_vocab_size {config.draft_vocab_size} is more than vocab_size "
                                  f"{config.vocab_size}")
    expected = dict(form.shapes(config))
    if config.draft_vocab_size < config.vocab_size:
        expected[TOKEN_MAP] = (config.draft_vocab_size,)
    exact_tensors(directory.name, tensors, expected)
    vocabulary = _vocabulary(directory, config, tensors.pop(TOKEN_MAP, None))
    _check_numbers(directory, tensors)
    card = read_card(directory)
    if card is not None and card.family != form.family:
        raise _invalid(directory, f"its card is of a {card.family} drafter, its config.json of {form.architecture}")
    if target is not None:
        _check_fits(directory, config, target)
    return StoredHeads(config, vocabulary, tensors)


def _check_fits(directory: Path, config: HeadsConfig, target: TargetConfig) -> None:
    wanted, got = (target.hidden_size, target.vocab_size), (config.hidden_size, config.vocab_size)
    if wanted != got:
        raise CheckpointInvalid(f"drafter {directory} is for a target of hidden size {got[0]} and vocabulary {got[1]}, "
                                f"this target has {wanted[0]} and {wanted[1]}", "serve it with its own target")


def _vocabulary(directory: Path, config: HeadsConfig, token_map: Tensor | None) -> DraftVocabulary:
    if token_map is None:
        return DraftVocabulary(torch.arange(config.vocab_size, device="cpu"), config.vocab_size)
    ids = token_map.cpu()
    ascending = ids.dtype == torch.int64 and bool((ids.diff() > 0).all())
    if not ascending or not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:
        raise _invalid(directory, f"{TOKEN_MAP} is no ascending list of token ids below {config.vocab_size}")
    return DraftVocabulary(ids, config.vocab_size)


def _check_numbers(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
        raise _invalid(directory, f"its tensors are of types {sorted(str(kind) for kind in kinds)}, not of one "
                                  "floating-point type")
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise _invalid(directory, f"{', '.join(broken)} hold numbers that are not finite")


def _number(directory: Path, found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _invalid(directory, f"{key} is {value!r}, not a positive whole number")
    return value


def _invalid(directory: Path, what: str) -> CheckpointInvalid:
    return CheckpointInvalid(f"drafter {directory.name}: {what}", _EXPORT_AGAIN)

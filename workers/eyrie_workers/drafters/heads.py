"""What Medusa and Hydra share: heads on the target's state after the final norm, and their checkpoint format.

The config keys are those of vLLM's `MedusaConfig` (`transformers_utils/configs/medusa.py`):

    hidden_size, vocab_size   the target's
    truncated_vocab_size      draft vocabulary; smaller than vocab_size only with a tensor `token_map`
    num_heads                 tokens looked ahead
    num_hidden_layers         of each head; always 1
    original_lm_head          one output matrix for all heads in place of one each
    medusa_fc_bias            always false: the heads have no biases

    token_map [D] int64       target id of each draft id, ascending

Reading is strict: all keys must be present, and all tensors have their shape, one floating-point dtype and finite
values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_workers.drafters.card import Card, read_card
from eyrie_workers.drafters.checkpoint import (
    CheckpointInvalid,
    as_stored,
    check_tensors,
    read_config,
    read_tensors,
    refuse_other_sizes,
    write_checkpoint,
)
from eyrie_workers.speculation.protocol import CommittedIndices, CommittedTokens
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

UNLIMITED_LENGTH = 2**31 - 1
"""`max_length` of proposers without positions."""


def residual_silu(x: Tensor, inner: Tensor) -> Tensor:
    """x + SiLU(inner), in x's dtype."""
    return x + F.silu(inner.to(x.dtype))


def last_states(pairs: CommittedTokens, indices: CommittedIndices) -> Tensor:
    """[B, H] the first aux state of each row's last pair."""
    return pairs.aux[:, :, 0].flatten(0, 1).index_select(0, indices.last)


TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class HeadsConfig:
    """The sizes that determine the tensors."""

    hidden_size: int
    """The target's."""

    vocab_size: int
    """The target's."""

    draft_vocab_size: int
    num_heads: int


@dataclass(frozen=True)
class HeadsFormat:
    """The format of one family."""

    family: str
    shared_output: bool
    """One output matrix for all heads."""

    shapes: Callable[[HeadsConfig], Mapping[str, tuple[int, ...]]]
    """Names and shapes of the tensors, without `token_map`."""

    @property
    def architecture(self) -> str:
        """`architectures[0]` of the config."""
        return FAMILIES[self.family].architecture


@dataclass(frozen=True)
class StoredHeads:
    """The contents of a valid directory."""

    config: HeadsConfig
    vocabulary: DraftVocabulary
    tensors: dict[str, Tensor]


def save_heads(directory: Path, heads: HeadsFormat, config: HeadsConfig, vocabulary: DraftVocabulary,
               tensors: Mapping[str, Tensor], dtype: str, card: Card | None) -> None:
    """Write a drafter to `directory`, replacing an existing one, atomically."""
    stored = as_stored(tensors, dtype)
    if config.draft_vocab_size < config.vocab_size:
        stored |= as_stored({TOKEN_MAP: vocabulary.ids}, dtype)
    write_checkpoint(directory, {
        "architectures": [heads.architecture], "model_type": heads.family,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size, "num_heads": config.num_heads,
        "num_hidden_layers": 1, "original_lm_head": heads.shared_output, "medusa_fc_bias": False,
        "torch_dtype": dtype, "dtype": dtype}, stored, card)


def load_heads(directory: Path, heads: HeadsFormat, target: TargetConfig | None) -> StoredHeads:
    """Read a drafter, and check that it fits `target` if given. Raises ArtifactMissing when files are missing,
    CheckpointInvalid when they break the format."""
    found, tensors = read_config(directory), read_tensors(directory)
    config = HeadsConfig(*(_number(directory, found, key) for key in (
        "hidden_size", "vocab_size", "truncated_vocab_size", "num_heads")))
    for key, expected_value in (("architectures", [heads.architecture]), ("num_hidden_layers", 1),
                      ("original_lm_head", heads.shared_output), ("medusa_fc_bias", False)):
        if found.get(key) != expected_value:
            raise _invalid(directory, f"{key} is {found.get(key)!r}; Eyrie's {heads.family} drafters have "
                                      f"{expected_value!r}")
    if config.draft_vocab_size > config.vocab_size:
        raise _invalid(directory, f"truncated_vocab_size {config.draft_vocab_size} is more than vocab_size "
                                  f"{config.vocab_size}")
    expected = dict(heads.shapes(config))
    if config.draft_vocab_size < config.vocab_size:
        expected[TOKEN_MAP] = (config.draft_vocab_size,)
    check_tensors(directory.name, tensors, expected)
    vocabulary = _vocabulary(directory, config, tensors.pop(TOKEN_MAP, None))
    _check_values(directory, tensors)
    card = read_card(directory)
    if card is not None and card.family != heads.family:
        raise _invalid(directory, f"its card is of a {card.family} drafter, its config.json of {heads.architecture}")
    if target is not None:
        refuse_other_sizes(directory, config.hidden_size, config.vocab_size, target)
    return StoredHeads(config, vocabulary, tensors)


def _vocabulary(directory: Path, config: HeadsConfig, token_map: Tensor | None) -> DraftVocabulary:
    if token_map is None:
        return DraftVocabulary(torch.arange(config.vocab_size, device="cpu"), config.vocab_size)
    ids = token_map.cpu()
    ascending = ids.dtype == torch.int64 and bool((ids.diff() > 0).all())
    if not ascending or not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:
        raise _invalid(directory, f"{TOKEN_MAP} is not an ascending list of token ids below {config.vocab_size}")
    return DraftVocabulary(ids, config.vocab_size)


def _check_values(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        raise _invalid(directory, f"its tensors are of types {sorted(map(str, dtypes))}, not of one floating-point "
                                  "type")
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise _invalid(directory, f"{', '.join(broken)} hold values that are not finite")


def _number(directory: Path, found: Mapping[str, Any], key: str) -> int:
    value = found.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _invalid(directory, f"{key} is {value!r}, not a positive whole number")
    return value


def _invalid(directory: Path, what: str) -> CheckpointInvalid:
    return CheckpointInvalid(f"drafter {directory.name}: {what}", "export the drafter again")

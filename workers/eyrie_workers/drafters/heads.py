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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.contract.families import FAMILIES
from eyrie_api.planning.drafter_rules import config_rules, tensor_rules
from eyrie_workers.drafters import checkpoint
from eyrie_workers.drafters.card import Card, read_card
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.speculation.protocol import CommittedIndices, CommittedTokens, DrafterState
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

UNLIMITED_LENGTH = 2**31 - 1
"""`max_length` of proposers without positions."""

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


class HeadsDrafter(nn.Module):
    """A drafter of heads; a family adds its parameters."""

    family: ClassVar[str]
    shared_output: ClassVar[bool]
    """One output matrix for all heads."""

    def __init__(self, config: HeadsConfig, vocabulary: DraftVocabulary) -> None:
        """Parameters at torch's default initialisation; `create` initialises from the target."""
        super().__init__()
        assert (config.vocab_size, config.draft_vocab_size) == (vocabulary.vocab_size, vocabulary.size)
        self.config, self.vocabulary = config, vocabulary


HeadsT = TypeVar("HeadsT", bound=HeadsDrafter)


# --- decoding --------------------------------------------------------------------------------------------------------


def residual_silu(x: Tensor, inner: Tensor) -> Tensor:
    return x + F.silu(inner.to(x.dtype))


def last_states(pairs: CommittedTokens, indices: CommittedIndices) -> Tensor:
    """[B, H] the first aux state of each row's last pair."""
    return pairs.aux[:, :, 0].flatten(0, 1).index_select(0, indices.last)


class HeadsProposer:
    """What the proposers share: `speculation.protocol.Drafter` without keys and positions. The state is [rows, ..] what
    the first head reads of each row."""

    max_length = UNLIMITED_LENGTH

    def __init__(self, drafter: HeadsDrafter, num_layers: int, width: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        """num_layers: of the target. width: of what the first head reads. dtype: of the products."""
        self.aux_layers = (num_layers,)
        self._num_heads, self._width = drafter.config.num_heads, width
        self._dtype, self._device = dtype, device

    def new_state(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self._width, dtype=self._dtype, device=self._device)

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Does nothing: the first pairs overwrite the row's state."""


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_heads(directory: Path, drafter: HeadsDrafter, dtype: str = "float32", card: Card | None = None) -> None:
    config, stored = drafter.config, checkpoint.as_stored(drafter.state_dict(), dtype)
    if config.draft_vocab_size < config.vocab_size:
        stored |= checkpoint.as_stored({TOKEN_MAP: drafter.vocabulary.ids}, dtype)
    checkpoint.write_checkpoint(directory, {
        "architectures": [FAMILIES[drafter.family].architecture], "model_type": drafter.family,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size, "num_heads": config.num_heads,
        "num_hidden_layers": 1, "original_lm_head": drafter.shared_output, "medusa_fc_bias": False,
        "torch_dtype": dtype, "dtype": dtype}, stored, card)


def load_heads(kind: type[HeadsT], directory: Path, target: TargetConfig | None) -> HeadsT:
    """Read a drafter, and check that it fits `target` if given. Raises ArtifactMissing when files are missing,
    CheckpointInvalid when they break the format."""
    def invalid(what: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"drafter {directory.name}: {what}", "export the drafter again")

    # 1. The config.
    written: Mapping[str, Any] = checkpoint.read_config(directory)
    tensors, architecture = checkpoint.read_tensors(directory), FAMILIES[kind.family].architecture
    checkpoint.refuse(directory.name, config_rules(kind.family, written))
    config = HeadsConfig(*(written[key] for key in ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads")))
    # 2. Names and shapes of the tensors: those of an empty drafter of this config.
    with torch.device("meta"):
        ids = torch.arange(config.draft_vocab_size, device="cpu")
        drafter = kind(config, DraftVocabulary(ids, config.vocab_size))
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    if config.draft_vocab_size < config.vocab_size:
        expected[TOKEN_MAP] = (config.draft_vocab_size,)  # no buffer of the module
    checkpoint.refuse(directory.name, tensor_rules(checkpoint.headers_of(tensors), expected))
    # 3. The vocabulary, and the values.
    if TOKEN_MAP in tensors:
        ids = tensors.pop(TOKEN_MAP).cpu()
        ascending = ids.dtype == torch.int64 and bool((ids.diff() > 0).all())
        if not ascending or not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:
            raise invalid(f"{TOKEN_MAP} is not an ascending list of token ids below {config.vocab_size}")
        drafter.vocabulary = DraftVocabulary(ids, config.vocab_size)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        raise invalid(f"its tensors are of types {sorted(map(str, dtypes))}, not of one floating-point type")
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise invalid(f"{', '.join(broken)} hold values that are not finite")
    card = read_card(directory)
    if card is not None and card.family != kind.family:
        raise invalid(f"its card is of a {card.family} drafter, its config.json of {architecture}")
    if target is not None:
        checkpoint.refuse_another_target(str(directory), kind.family, written, target)
    drafter.load_state_dict(tensors, assign=True)
    return drafter

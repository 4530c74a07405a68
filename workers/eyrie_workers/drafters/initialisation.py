"""Initial parameters of new drafters, and the target's tensors they are initialised from.

The three tensors are read one by one from the target's files, so that the other weights of a 70B target never enter
memory.

    V vocabulary, H hidden
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eyrie_api.errors import ArtifactCorrupt, UnsupportedTarget
from eyrie_workers.targets.loading import special_token_ids, weight_files

_INITIAL_STD = 0.02

_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class TargetEmbeddings:
    """Input and output embeddings of the target in float32: embed [V, H], lm_head [V, H], and norm [H], the final norm.
    """

    embed: Tensor
    lm_head: Tensor
    norm: Tensor
    special: tuple[int, ...] = ()
    """Ids of the tokenizer's special tokens, ascending."""

    def to(self, device: torch.device) -> "TargetEmbeddings":
        """A copy on a device; tied matrices stay tied."""
        embed = self.embed.to(device)
        lm_head = embed if self.lm_head is self.embed else self.lm_head.to(device)
        return TargetEmbeddings(embed, lm_head, self.norm.to(device), self.special)


def read_target_embeddings(path: Path, tie_word_embeddings: bool) -> TargetEmbeddings:
    """Read the embeddings of the target in `path`. Raises UnsupportedTarget when they are missing, ArtifactCorrupt when
    a file is unreadable."""
    names = {_EMBED, _NORM} if tie_word_embeddings else {_EMBED, _NORM, _HEAD}
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in names & set(handle.keys()):
                    tensors[name] = handle.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise ArtifactCorrupt(f"{file} cannot be read: {error}", "download or save the model again") from error
    if _EMBED not in tensors or _NORM not in tensors:
        raise UnsupportedTarget(f"{path} has no {_EMBED} or no {_NORM}", "use a Llama or Qwen target")
    return TargetEmbeddings(tensors[_EMBED], tensors.get(_HEAD, tensors[_EMBED]), tensors[_NORM],
                            tuple(sorted(special_token_ids(path))))


@torch.no_grad()
def initialise_parameters(module: nn.Module, seed: int) -> None:
    """Set every matrix to normal(0, 0.02) and every other parameter to one, in place."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 2:
            parameter.normal_(0.0, _INITIAL_STD, generator=generator)
        else:
            parameter.fill_(1.0)

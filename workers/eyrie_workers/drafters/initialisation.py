"""Initial parameters of new drafters, and the target's tensors they are initialised from.

The three tensors are read one by one from the target's files, so that the other weights of a 70B target never enter
memory.

    V vocabulary, H hidden
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eyrie_api.errors import ArtifactCorrupt, UnsupportedTarget
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.loading import special_token_ids, weight_files

_INITIAL_STD = 0.02

_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class TargetEmbeddings:
    """Input and output embeddings of the target: embed [V, H], lm_head [V, H], and norm [H], the final norm.

    All drafters that a process trains share one object, and so one copy of the matrices on the device.
    """

    embed: Tensor
    lm_head: Tensor
    norm: Tensor
    special: tuple[int, ...] = ()
    """Ids of the tokenizer's special tokens, ascending."""

    _converted: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def lm_head_as(self, dtype: torch.dtype) -> Tensor:
        """lm_head in a dtype: itself, or one copy for all who ask for that dtype."""
        if dtype not in self._converted:
            self._converted[dtype] = self.lm_head.to(dtype)
        return self._converted[dtype]


def read_target_embeddings(path: Path, tie_word_embeddings: bool, device: torch.device = CPU) -> TargetEmbeddings:
    """Read the embeddings of the target in `path` to a device. Raises UnsupportedTarget when they are missing,
    ArtifactCorrupt when a file is unreadable.

    On a CPU all are float32. On a GPU the matrices keep the checkpoint's dtype: a product of bfloat16 sums in float32
    there, and a float32 copy would be twice the memory and an eighth of the rate.
    """
    names = {_EMBED, _NORM} if tie_word_embeddings else {_EMBED, _NORM, _HEAD}
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in names & set(handle.keys()):
                    tensor = handle.get_tensor(name)
                    keeps_dtype = device.type != "cpu" and name != _NORM
                    tensors[name] = (tensor if keeps_dtype else tensor.float()).to(device)
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

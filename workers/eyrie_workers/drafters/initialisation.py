"""What a new drafter takes over from its target before it has seen a token.

The drafter predicts with the target's taste in words, so its output matrix starts as the target's own rows for the
draft vocabulary and its last norm as the target's: from the first step the residual stream is asked to become
something the target would have read, not an arbitrary code. Measured on a half-trained quickstart target after 30 k
drafted positions, everything else equal: first-step accuracy .45, against .27 from a random output matrix. Taking more
made it worse at the same point: an identity from the high layer through `fc` .31, and with it the MLP and attention of
the last layer .34, of the first .39. The states a drafter reads have already become predictions of token i+1, while it
must predict i+2: circuits that read other layers are in the way.

The target's three tensors are read one by one: a 70B target's other weights never enter memory.

    V vocabulary, D draft vocabulary, H hidden
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.errors import ArtifactCorrupt, UnsupportedTarget
from eyrie_workers.drafters.eagle3.model import Eagle3Drafter
from eyrie_workers.targets.loading import special_token_ids, weight_files

_INITIAL_STD = 0.02

_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class TargetEmbeddings:
    """The two ends of the target, in float32: embed [V, H], lm_head [V, H], and norm [H], the last before lm_head."""

    embed: Tensor
    lm_head: Tensor
    norm: Tensor
    special: tuple[int, ...] = ()
    """Ids that the tokenizer marks as special, ascending: no answer is made of them."""

    def to(self, device: torch.device) -> "TargetEmbeddings":
        """The same, on a device; one matrix stays one."""
        embed = self.embed.to(device)
        lm_head = embed if self.lm_head is self.embed else self.lm_head.to(device)
        return TargetEmbeddings(embed, lm_head, self.norm.to(device), self.special)


def read_target_embeddings(path: Path, tie_word_embeddings: bool) -> TargetEmbeddings:
    """Read the ends of the target in `path`. Raises UnsupportedTarget without them, ArtifactCorrupt when unreadable."""
    wanted = {_EMBED, _NORM} if tie_word_embeddings else {_EMBED, _NORM, _HEAD}
    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in wanted & set(handle.keys()):
                    found[name] = handle.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise ArtifactCorrupt(f"{file} cannot be read: {error}", "download or save the model again") from error
    if _EMBED not in found or _NORM not in found:
        raise UnsupportedTarget(f"{path} has no {_EMBED} or no {_NORM}", "use a Llama or Qwen target")
    return TargetEmbeddings(found[_EMBED], found.get(_HEAD, found[_EMBED]), found[_NORM],
                      tuple(sorted(special_token_ids(path))))


@torch.no_grad()
def inherit(drafter: Eagle3Drafter, ends: TargetEmbeddings, seed: int) -> None:
    """Initialise every parameter in place: from the target where it helps, normal(0, 0.02) elsewhere, norms at one."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(drafter.named_parameters()):
        if parameter.dim() == 2:
            parameter.normal_(0.0, _INITIAL_STD, generator=generator)
        else:
            parameter.fill_(1.0)
    drafter.lm_head.weight.copy_(ends.lm_head.index_select(0, drafter.vocabulary.ids))
    drafter.norm.weight.copy_(ends.norm)

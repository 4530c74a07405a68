"""Initial parameters of new drafters, and the target's tensors they are initialised from.

They are found by their names in any checkpoint of transformers, and read one by one, so that the other weights of a 70B
target never enter memory.

    V vocabulary, H hidden
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.sglang_support import MTP_LAYER
from eyrie_api.planning.target_config import language_model, logit_transform
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.loading import DTYPES, special_token_ids, stored_tensors, weight_files
from eyrie_workers.targets.operators import OutputHead

_INITIAL_STD = 0.02

_VALUES = r"\.(weight|qweight|weight_packed)$"
_ROLES = {"embed": re.compile(r"(^|\.)(embed_tokens|embeddings|embed_in|wte|word_embeddings)" + _VALUES),
          "head": re.compile(r"(^|\.)(lm_head|embed_out)" + _VALUES),
          "norm": re.compile(r"(^|\.)(norm|norm_f|final_layernorm|final_norm|ln_f)\.weight$")}
"""Names under which checkpoints of transformers store the three tensors, behind any prefix; also quantised."""

_OTHER_PARTS = re.compile(r"(^|\.)(layers|h|blocks|vision\w*|visual|audio\w*|mtp\w*)\.")

_ZERO_CENTRED_NORMS = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
"""`model_type` of models whose final norm multiplies by 1 + weight (modeling files of transformers 5.19)."""


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

    scale: float = 1.0
    """Of the target's logits (`targets.operators`), a part of `lm_head`."""

    soft_cap: float | None = None
    """Bound of the target's logits."""

    path: Path | None = field(default=None, compare=False)
    """Of the target, for `mtp_layer`."""

    _converted: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def output_head(self) -> OutputHead:
        return OutputHead(self.lm_head, self.soft_cap)

    def mtp_layer(self) -> dict[str, Tensor]:
        """The tensors below `MTP_LAYER` by their names there, in float32; empty where the target has none. Raises as
        `read_target_embeddings`."""
        files = () if self.path is None else weight_files(self.path)
        return {name.removeprefix(MTP_LAYER): tensor.float() for file in files
                for name, tensor in stored_tensors(file, lambda name: name.startswith(MTP_LAYER))}

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
    config = read_json(path / "config.json")
    scale, soft_cap = logit_transform(language_model(config))
    tensors: dict[str | None, Tensor] = {}
    unread = (None, "head") if tie_word_embeddings else (None,)
    for file in weight_files(path):
        for name, tensor in stored_tensors(file, lambda name: _role(name) not in unread):
            role = _role(name)
            if tensor.dtype not in DTYPES.values() and tensor.dtype != torch.float64:
                raise UnsupportedTarget(f"{path}: {name} is stored as {tensor.dtype}, and drafters read its values",
                                        "give a model whose embedding and output matrix are not quantised")
            keeps_dtype = device.type != "cpu" and role != "norm"
            tensors[role] = (tensor if keeps_dtype else tensor.float()).to(device)
    if "embed" not in tensors:
        raise UnsupportedTarget(f"{path} has no tensor named like an embedding of tokens (embed_tokens.weight)",
                                "save the model again with save_pretrained")
    embed = tensors["embed"]
    norm = tensors.get("norm", embed.new_ones(embed.shape[1], dtype=torch.float32))
    if str(language_model(config).get("model_type", "")).startswith(_ZERO_CENTRED_NORMS):
        norm = norm + 1.0
    return TargetEmbeddings(embed, OutputHead.of(tensors.get("head", embed), scale).weight_VH, norm,
                            tuple(sorted(special_token_ids(path))), scale, soft_cap, path)


def _role(name: str) -> str | None:
    """What a tensor of a checkpoint is, by its name: embed, head or norm of the language model."""
    if _OTHER_PARTS.search(name):
        return None
    return next((role for role, pattern in _ROLES.items() if pattern.search(name)), None)


@torch.no_grad()
def initialise_parameters(module: nn.Module, seed: int) -> None:
    """Set every matrix to normal(0, 0.02) and every other parameter to one, in place."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 2:
            parameter.normal_(0.0, _INITIAL_STD, generator=generator)
        else:
            parameter.fill_(1.0)

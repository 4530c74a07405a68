"""Sources of a target's hidden states: one interface for capture and streaming, whoever computes them.

    reference      our forward pass (`targets.model`), for the architectures it computes
    transformers   any decoder-only model of transformers (`targets.transformers_target`)
    sglang         a managed server of SGLang (`engines.sglang.capture_states`), opened by the capture stage

Which one a job uses is decided by `eyrie_api.decisions.target_config.choose_source`.
"""

# M tokens of all texts, A aux layers, H hidden

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from eyrie_api.decisions.target_config import choose_source
from eyrie_api.v1alpha1.targets import Dtype, TargetSpec
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.output_head import OutputHead


class StateSource(Protocol):
    """A loaded target that computes teacher-forced hidden states."""

    @property
    def device(self) -> torch.device:
        """Where the states are."""

    @property
    def output_head(self) -> OutputHead:
        """What turns final states into logits, on `device`."""

    def packed_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States of whole texts, each attending to itself alone, end to end.

        token_ids_list  of [T_i] int64
        aux_layers      `hidden_states` indices: 0 embeddings, k output of layer k - 1, num_layers after the final norm
        returns         aux [M, A, H] and last [M, H], the state after the final norm, on `device`
        """


def open_source(name: Literal["reference", "transformers"], target: TargetSpec,
                device: torch.device | None = None) -> StateSource:
    """Load the target with a source; default device: `default_device()`. Raises as `load_target`."""
    if name == "reference":
        return load_target(resolve(target), target.dtype, device)
    from eyrie_workers.targets.transformers_target import load_transformers_target  # transformers: seconds to import

    return load_transformers_target(resolve(target), target.dtype, device)


def open_local(target_dir: Path, dtype: Dtype) -> StateSource:
    """Load the target with the source that computes it without a server. Raises as `load_target`."""
    name = choose_source(read_json(target_dir / "config.json"), "auto")
    assert name != "sglang"
    return open_source(name, TargetSpec(model=str(target_dir), dtype=dtype))

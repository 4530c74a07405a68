"""Compares our hidden states with those of `transformers` on a few rows, before a capture of hours.

A drafter trained on the states of the wrong layer trains well and is worth little when served: the loss cannot show it.
The states that capture is about to record are therefore compared with `hidden_states` of `transformers`, computed by
other code from the same files, index by index. The error to the same layer must be rounding; the error to its
neighbours is reported with it, because a check that passes for any layer proves nothing.

The two models are never in memory together: the reference is loaded on the device that computes, its states are copied
to the host, and it is freed before ours is loaded. Only the compared layers and their neighbours are copied.

(The serving engine's layers are compared by tests/sglang, round by round, and before a promotion by the parity gate of
`measurement.parity`: an engine returns text, and what it captured shows in what it accepts.)
"""

# T tokens of a row, A aux layers, H hidden

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyrie_api.errors import Permanent
from eyrie_workers.targets.transformers_model import load_causal_model

# Two orders of summation through all layers: rounding grows with depth, the distance to a neighbour hardly does.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


class LayersDisagree(Permanent):
    """Our forward pass does not compute what `transformers` does."""

    reason = "LayersDisagree"


@dataclass(frozen=True)
class LayerAgreement:
    """Relative distances |ours - theirs| / |theirs| over some rows."""

    layer: int
    error: float
    neighbour: float
    """Distance to the nearer of the two adjacent layers."""


def reference_states(path: Path, dtype: str, token_ids: Sequence[Tensor], aux_layers: Sequence[int],
                     device: torch.device) -> list[dict[int, Tensor]]:
    """Per row, `hidden_states` [T, H] of `transformers` in float32 on the CPU, by index: those of `aux_layers` and the
    layers next to them. The model is computed on `device` and freed on return. Raises MemoryTooSmall."""
    model = load_causal_model(path, dtype, device)
    wanted = {near for layer in aux_layers for near in (layer - 1, layer, layer + 1)}
    found = []
    with torch.inference_mode():
        for tokens in token_ids:
            states = model(tokens[None].to(device), output_hidden_states=True).hidden_states
            found.append({layer: states[layer][0].float().cpu() for layer in wanted if 0 <= layer < len(states)})
    return found


def compare(ours: Sequence[Tensor], theirs: Sequence[Mapping[int, Tensor]], aux_layers: Sequence[int],
            dtype: str) -> tuple[LayerAgreement, ...]:
    """Compare aux states [T, A, H] of some rows, on the CPU, with the reference's.

    Raises LayersDisagree naming the layers.
    """
    agreements = []
    for column, layer in enumerate(aux_layers):
        mine = torch.cat([aux[:, column].float() for aux in ours])
        adjacent = [one for one in (layer - 1, layer + 1) if one in theirs[0]]
        agreements.append(LayerAgreement(
            layer, _distance(mine, theirs, layer), min(_distance(mine, theirs, one) for one in adjacent)))
    wrong = [one for one in agreements if not one.error <= _TOLERANCE[dtype]]
    if wrong:
        errors = ", ".join(f"layer {one.layer}: {one.error:.2g}" for one in wrong)
        raise LayersDisagree(f"aux hidden states differ from those of transformers ({errors}; {_TOLERANCE[dtype]:g} is "
                             f"rounding in {dtype})", "report this target's config.json: its forward pass has "
                             "something ours lacks; capture.check_rows 0 leaves the check out")
    return tuple(agreements)


def _distance(mine: Tensor, theirs: Sequence[Mapping[int, Tensor]], layer: int) -> float:
    reference = torch.cat([row[layer] for row in theirs])
    return float((mine - reference).norm() / reference.norm())

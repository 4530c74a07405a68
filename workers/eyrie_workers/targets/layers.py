"""Selection of the target's aux hidden states for a drafter.

EAGLE-3 (arXiv:2503.01840, section 3.1) fuses a low, a middle and a high layer. Indices here are Hugging Face
`hidden_states` indices: 0 is the embedding, i + 1 the output of layer i, num_layers the state after the final norm. The
default (2, num_layers // 2, num_layers - 3) is what SGLang captures for a target without a list of its own.

On hybrid targets most layers see only a window or a recurrent state; the output of such a layer holds little about
distant context. There each choice moves to the nearest full-attention layer's output, as the seed on training a drafter
for a hybrid target found necessary. The last layer is left out: serving engines capture the input of the next layer,
and the last layer has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eyrie_api.errors import InvalidInput

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class LayerChoice:
    """The chosen `hidden_states` indices, ascending and distinct, and why."""

    aux_layers: tuple[int, ...]
    reason: str


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high for a target of this depth; fewer when it has fewer than four layers. The last layer's output
    is left out, as for hybrids, so of two layers the embeddings are the other state."""
    if num_layers < 4:
        return tuple(range(num_layers))[-2:]
    wanted = sorted((2, num_layers // 2, num_layers - 3))
    lowest = 1
    chosen: list[int] = []
    for index, value in enumerate(wanted):
        highest = num_layers - len(wanted) + index  # the layers after this one need higher indices
        chosen.append(min(max(value, lowest), highest))
        lowest = chosen[-1] + 1
    return tuple(chosen)


def choose_aux_layers(num_layers: int, layer_types: Sequence[str] | None = None,
                      override: Sequence[int] | None = None) -> LayerChoice:
    """Choose aux layers for a target of `num_layers` whose attention types are `layer_types` (None: all full).

    Raises InvalidInput when an override is empty, out of 0..num_layers, repeated or not ascending.
    """
    if override is not None:
        return LayerChoice(_validated(num_layers, tuple(override)), "given by the spec")
    default = default_aux_layers(num_layers)
    if layer_types is None or all(kind == FULL_ATTENTION for kind in layer_types):
        return LayerChoice(default, f"low, middle and high of {num_layers} layers, all with full attention")
    outputs = [i + 1 for i, kind in enumerate(layer_types) if kind == FULL_ATTENTION and i + 1 < num_layers]
    if len(outputs) < 2:  # with a single state SGLang would skip the drafter's fc
        return LayerChoice(default, f"low, middle and high of {num_layers} layers; before the last, "
                                    f"{len(outputs)} has full attention")
    moved = _nearest_distinct(default, outputs)
    kinds = ", ".join(sorted(set(layer_types) - {FULL_ATTENTION}))
    return LayerChoice(moved, f"hybrid target ({layer_types.count(FULL_ATTENTION)} of {num_layers} layers have full "
                              f"attention, the others {kinds}): {list(default)} moved to the outputs of "
                              f"full-attention layers {list(moved)}")


def _nearest_distinct(wanted: Sequence[int], available: Sequence[int]) -> tuple[int, ...]:
    """For each wanted index the nearest available one not yet taken (the lower on a tie), ascending."""
    free = list(available)
    taken: list[int] = []
    for index in wanted:
        if free:
            nearest = min(free, key=lambda candidate: (abs(candidate - index), candidate))
            free.remove(nearest)
            taken.append(nearest)
    return tuple(sorted(taken))


def _validated(num_layers: int, override: tuple[int, ...]) -> tuple[int, ...]:
    hint = f"give distinct ascending indices between 0 (embeddings) and {num_layers} (after the final norm)"
    if not override:
        raise InvalidInput("capture.aux_layers is empty", hint)
    outside = [index for index in override if not 0 <= index <= num_layers]
    if outside:
        raise InvalidInput(f"capture.aux_layers {outside} are outside the target's {num_layers} layers", hint)
    if list(override) != sorted(set(override)):
        raise InvalidInput(f"capture.aux_layers {list(override)} are not distinct and ascending", hint)
    return override

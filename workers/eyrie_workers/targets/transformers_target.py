"""Hidden states of any decoder-only model of `transformers`, for architectures that our forward pass does not compute.

`hidden_states[k]` of transformers is what layer k receives, so the states are recorded where layers are entered, and of
the requested layers alone: `output_hidden_states` would keep all of them. The state after the final norm is what the
decoder returns.

A checkpoint whose logits are not the head's product of that state (a bias, a factor that no rule here knows) would be
captured wrongly without any error. `verify` therefore computes one text both ways, states and logits, before capture
begins.

Texts of a pass are padded on the right to one length. Every layer is causal (attention, convolution or recurrence), so
nothing after a token changes its state, and no mask is needed. Texts of different lengths are computed in several
batches, so that padding adds at most a third.
"""

# B texts of a batch, T tokens, M tokens of all texts, A aux layers, H hidden, V vocabulary

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyrie_api.errors import UnsupportedTarget
from eyrie_workers.targets.config import TargetConfig, read_config
from eyrie_workers.targets.device import default_device
from eyrie_workers.targets.output_head import OutputHead
from eyrie_workers.targets.transformers_model import load_causal_model

_SHORTEST = 0.75
"""Length of a batch's shortest text, as a share of its longest."""

# Both sides compute the same operations of the same model; only the shape of a batch and of a product differs.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}


class TransformersTarget:
    """A loaded model, as a `state_source.StateSource`."""

    def __init__(self, model: Any, config: TargetConfig, dtype: str) -> None:
        """`model` is a causal language model of transformers. Raises UnsupportedTarget when its layers or its output
        matrix are not found."""
        self.config = config
        self._model, self._dtype = model, dtype
        decoder = model.get_decoder()
        # A few classes (Llama 4) return themselves; their decoder is `model`, as everywhere.
        self._decoder = model.model if decoder is model else decoder
        self._layers = _layers_of(self._decoder, config.num_layers)
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is None or getattr(head, "bias", None) is not None:
            raise UnsupportedTarget(f"{type(model).__name__} has no output matrix, or one with a bias",
                                    "drafters are trained on the product of a state and a matrix: use another target")
        self._head = OutputHead.of(weight.detach(), config.logit_scale, config.logit_soft_cap)

    @property
    def device(self) -> torch.device:
        """See `StateSource`."""
        return self._head.weight_VH.device

    @property
    def output_head(self) -> OutputHead:
        """See `StateSource`."""
        return self._head

    @torch.inference_mode()
    def packed_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `StateSource`."""
        lengths = [len(tokens) for tokens in token_ids_list]
        hidden, dtype = self.config.hidden_size, self._head.weight_VH.dtype
        aux = torch.empty(sum(lengths), len(aux_layers), hidden, dtype=dtype, device=self.device)
        last = torch.empty(sum(lengths), hidden, dtype=dtype, device=self.device)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for batch in similar_lengths(lengths):
            longest = max(lengths[index] for index in batch)
            padded_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
            for place, index in enumerate(batch):
                padded_BT[place, : lengths[index]] = token_ids_list[index]
            states, last_BTH = self._states(padded_BT.to(self.device), aux_layers)
            for place, index in enumerate(batch):
                here = slice(starts[index], starts[index] + lengths[index])
                for column, layer in enumerate(aux_layers):
                    aux[here, column] = states[layer][place, : lengths[index]]
                last[here] = last_BTH[place, : lengths[index]]
        return aux, last

    def _states(self, padded_BT: Tensor, aux_layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        with _entering(self._layers, [layer for layer in aux_layers if layer < len(self._layers)]) as states:
            last_BTH = self._decoder(input_ids=padded_BT, use_cache=False).last_hidden_state
        return states | {self.config.num_layers: last_BTH}, last_BTH

    @torch.inference_mode()
    def verify(self, token_ids: Tensor) -> None:
        """Compare states and logits of a text [T] with the model's own. Raises UnsupportedTarget."""
        every = range(self.config.num_layers + 1)
        aux_MAH, last_MH = self.packed_states([token_ids], every)
        whole = self._model(input_ids=token_ids[None].to(self.device), output_hidden_states=True, use_cache=False)
        tolerance = _TOLERANCE[self._dtype]
        if len(whole.hidden_states) == len(every):
            for layer in every:
                if (error := _distance(aux_MAH[:, layer], whole.hidden_states[layer][0])) > tolerance:
                    raise UnsupportedTarget(
                        f"layer {layer} of {type(self._model).__name__} differs from its hidden_states by {error:.2g}",
                        "report this target's config.json, or use another target")
        if (error := _distance(self._head.logits(last_MH), whole.logits[0])) > tolerance:
            raise UnsupportedTarget(
                f"the logits of {type(self._model).__name__} are not its output matrix times its final state: they "
                f"differ by {error:.2g}", "report this target's config.json, or use another target")


def load_transformers_target(path: Path, dtype: str, device: torch.device | None = None) -> TransformersTarget:
    """The model in directory `path`. Raises UnsupportedTarget where transformers cannot load it, MemoryTooSmall before
    any weight is read."""
    try:
        model = load_causal_model(path, dtype, device or default_device())
    except (ValueError, ImportError, KeyError) as error:
        raise UnsupportedTarget(f"transformers cannot load {path}: {error}",
                                "use a target that AutoModelForCausalLM loads without code of its own") from error
    return TransformersTarget(model, read_config(path), dtype)


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in batches of similar length, longest first; none is empty."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        if batches and lengths[index] >= _SHORTEST * lengths[batches[-1][0]]:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _layers_of(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's layers: its one list of `num_layers` modules, under whatever name."""
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(found) != 1:
        raise UnsupportedTarget(f"{type(decoder).__name__} has {len(found)} lists of {num_layers} layers, not one",
                                "report this target's config.json, or use another target")
    return found[0]


@contextmanager
def _entering(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Records what the wanted layers receive during the forward pass within."""
    states: dict[int, Tensor] = {}

    def recorder(layer: int) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            states[layer] = args[0] if args else named["hidden_states"]
        return record

    hooks = [layers[layer].register_forward_pre_hook(recorder(layer), with_kwargs=True) for layer in wanted]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())

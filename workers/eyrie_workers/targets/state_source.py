"""Sources of a target's hidden states: one interface for capture and streaming, whoever computes them.

    reference      our forward pass (`targets.model`), for the architectures it computes
    transformers   any decoder-only model of transformers (`TransformersTarget`)
    sglang         a managed server of SGLang (`sglang.capture_states`), opened by the capture stage

Which one a job uses is decided by `eyrie_api.planning.target_config.choose_source`.

*transformers.* `hidden_states[k]` is what layer k receives, so the states are recorded where layers are entered, and of
the requested layers alone: `output_hidden_states` would keep all of them. The state after the final norm is what the
decoder returns. A checkpoint whose logits are not the head's product of that state (a bias, a factor that no rule here
knows) would be captured wrongly without any error. `verify` therefore computes one text both ways, states and logits,
before capture begins. Texts of a pass are padded on the right to one length. Every layer is causal (attention,
convolution or recurrence), so nothing after a token changes its state, and no mask is needed. Texts of different
lengths are computed in several batches, so that padding adds at most a third.

*Agreement.* A drafter trained on the states of the wrong layer trains well and is worth little when served: the loss
cannot show it. The states of the reference are therefore compared on a few rows with `hidden_states` of transformers,
computed by other code from the same files, index by index (`compare`). The error to the same layer must be rounding;
the error to its neighbours is reported with it, because a check that passes for any layer proves nothing. The two
models are never in memory together: the states of one are copied to the host, and it is freed before the other is
loaded. (The serving engine's layers are compared by tests/sglang, and before a promotion by the parity gate
(`measure.parity`): an engine returns text, and what it captured shows in what it accepts.)
"""

# B texts of a batch, T tokens, M tokens of all texts, A aux layers, H hidden, V vocabulary

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from eyrie_api.contract.targets import Dtype, TargetSpec
from eyrie_api.errors import Permanent, UnsupportedTarget
from eyrie_api.planning.target_config import choose_source
from eyrie_workers.targets.config import TargetConfig, read_config, read_json
from eyrie_workers.targets.device import CPU, default_device, free_bytes
from eyrie_workers.targets.loading import (
    DTYPES,
    CheckpointTensors,
    load_target,
    quantised_matrices,
    require_memory,
    require_tied_head,
    resolve,
    weight_bytes,
)
from eyrie_workers.targets.operators import OutputHead

LOGITS, CHECKED_LOGITS = -2, 8
"""The key of a row's logits among its states, no layer's nor next to one, and the number of positions whose logits are
compared."""

_SHORTEST = 0.75
"""Length of a batch's shortest text, as a share of its longest."""

# Both sides compute the same operations of the same model; only the shape of a batch and of a product differs.
_SAME_MODEL_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}

# Two orders of summation through all layers: rounding grows with depth, the distance to a neighbour hardly does.
_AGREEMENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


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
    return load_transformers_target(resolve(target), target.dtype, device)


def open_local(target_dir: Path, dtype: Dtype) -> StateSource:
    """Load the target with the source that computes it without a server. Raises as `load_target`."""
    name = choose_source(read_json(target_dir / "config.json"), "auto")
    assert name != "sglang"
    return open_source(name, TargetSpec(model=str(target_dir), dtype=dtype))


def open_judge(target_dir: Path, dtype: Dtype) -> StateSource | None:
    """`open_local`; None for a target that is quantised in a form that SGLang alone reads."""
    try:
        quantised_matrices(target_dir)
    except UnsupportedTarget:
        return None
    return open_local(target_dir, dtype)


class TransformersTarget:
    """A loaded model of transformers as a `StateSource`."""

    def __init__(self, model: Any, config: TargetConfig, dtype: str) -> None:
        """`model` is a causal language model of transformers. Raises UnsupportedTarget when its layers or its output
        matrix are not found."""
        self.config = config
        self._model, self._dtype = model, dtype
        decoder = model.get_decoder()
        # A few classes (Llama 4) return themselves; their decoder is `model`, as everywhere.
        self._decoder = model.model if decoder is model else decoder
        # The decoder's one list of that many modules, under whatever name.
        lists = [child for child in self._decoder.children()
                 if isinstance(child, nn.ModuleList) and len(child) == config.num_layers]
        if len(lists) != 1:
            raise UnsupportedTarget(
                f"{type(self._decoder).__name__} has {len(lists)} lists of {config.num_layers} layers, not one",
                "report this target's config.json, or use another target")
        self._layers = lists[0]
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is None or getattr(head, "bias", None) is not None:
            raise UnsupportedTarget(f"{type(model).__name__} has no output matrix, or one with a bias",
                                    "drafters are trained on the product of a state and a matrix: use another target")
        self.output_head = OutputHead.of(weight.detach(), config.logit_scale, config.logit_soft_cap)
        self.device = self.output_head.weight_VH.device

    @torch.inference_mode()
    def packed_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        lengths = [len(tokens) for tokens in token_ids_list]
        hidden, dtype = self.config.hidden_size, self.output_head.weight_VH.dtype
        aux = torch.empty(sum(lengths), len(aux_layers), hidden, dtype=dtype, device=self.device)
        last = torch.empty(sum(lengths), hidden, dtype=dtype, device=self.device)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for batch in similar_lengths(lengths):
            longest = max(lengths[index] for index in batch)
            padded_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
            for place, index in enumerate(batch):
                padded_BT[place, : lengths[index]] = token_ids_list[index]
            with _entering(self._layers, [layer for layer in aux_layers if layer < len(self._layers)]) as states:
                last_BTH = self._decoder(input_ids=padded_BT.to(self.device), use_cache=False).last_hidden_state
            states[self.config.num_layers] = last_BTH
            for place, index in enumerate(batch):
                here = slice(starts[index], starts[index] + lengths[index])
                for column, layer in enumerate(aux_layers):
                    aux[here, column] = states[layer][place, : lengths[index]]
                last[here] = last_BTH[place, : lengths[index]]
        return aux, last

    @torch.inference_mode()
    def verify(self, token_ids: Tensor) -> None:
        """Compare states and logits of a text [T] with the model's own. Raises UnsupportedTarget."""
        every = range(self.config.num_layers + 1)
        aux_MAH, last_MH = self.packed_states([token_ids], every)
        whole = self._model(input_ids=token_ids[None].to(self.device), output_hidden_states=True, use_cache=False)
        tolerance = _SAME_MODEL_TOLERANCE[self._dtype]
        if len(whole.hidden_states) == len(every):
            for layer in every:
                if (error := _distance(aux_MAH[:, layer], whole.hidden_states[layer][0])) > tolerance:
                    raise UnsupportedTarget(
                        f"layer {layer} of {type(self._model).__name__} differs from its hidden_states by {error:.2g}",
                        "report this target's config.json, or use another target")
        if (error := _distance(self.output_head.logits(last_MH), whole.logits[0])) > tolerance:
            raise UnsupportedTarget(
                f"the logits of {type(self._model).__name__} are not its output matrix times its final state: they "
                f"differ by {error:.2g}", "report this target's config.json, or use another target")


def load_transformers_target(path: Path, dtype: str, device: torch.device | None = None) -> TransformersTarget:
    """The model in directory `path`. Raises UnsupportedTarget where transformers cannot load it, MemoryTooSmall before
    any weight is read."""
    require_tied_head(path)
    try:
        model = load_causal_model(path, dtype, device or default_device())
    except (ValueError, ImportError, KeyError) as error:
        raise UnsupportedTarget(f"transformers cannot load {path}: {error}",
                                "use a target that AutoModelForCausalLM loads without code of its own") from error
    return TransformersTarget(model, read_config(path), dtype)


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices in batches of similar length, longest first; none is empty."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if batches and lengths[index] >= _SHORTEST * lengths[batches[-1][0]]:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def _entering(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Records what the wanted layers receive during the forward pass within."""
    states: dict[int, Tensor] = {}

    def record(layer: int, _module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[layer] = args[0] if args else named["hidden_states"]

    hooks = [layers[layer].register_forward_pre_hook(partial(record, layer), with_kwargs=True) for layer in wanted]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def load_causal_model(path: Path, dtype: str, device: torch.device) -> Any:
    """The model in directory `path` in evaluation mode. Raises MemoryTooSmall before any weight is read, and what
    transformers raises where it cannot load it.

    With `device_map` (accelerate) each tensor goes from the file to its GPU; without, the host would hold the whole
    checkpoint first, which for 70 billion parameters is 140 GB. A target that one GPU does not hold is spread, layer
    after layer, over the GPUs of the machine where this process is the only one that computes.
    """
    import transformers  # here: importing it takes longer than a small capture

    needed = weight_bytes(path, dtype)
    placed: dict[str, Any] = {}
    is_spread_out = False
    if device.type == "cuda":
        placed = {"device_map": {"": device}}
        free = [free_bytes(torch.device("cuda", index)) or 0 for index in range(torch.cuda.device_count())]
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1 and is_spread(needed, free_bytes(device), free):
            placed, is_spread_out = {"device_map": "auto"}, True
    if not is_spread_out:
        require_memory(str(device), needed, free_bytes(device), dtype)
    placed |= {"dtype": DTYPES[dtype], "local_files_only": True}
    if quantised_matrices(path) is None:
        return transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **placed).eval()
    # Given as tensors: transformers' own dequantisation needs a package for each method, takes the blocks of a matrix
    # for equally large, which the last is not where its size is no multiple, and leaves out a scale of another name.
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    weights = CheckpointTensors(path, DTYPES[dtype], CPU if is_spread_out else device)
    model, loaded = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict={name: _Unread(weights, name) for name in weights}, output_loading_info=True,
        **placed)
    if loaded["missing_keys"]:  # which transformers fills with random values, and warns
        raise UnsupportedTarget(f"{path} has no weights of {min(loaded['missing_keys'])!r}",
                                "give the checkpoint as it was published")
    return model.eval()


@dataclass(frozen=True)
class _Unread:
    """A weight that transformers reads when it comes to it, as it does those of files."""

    weights: CheckpointTensors
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        return self.weights[self.name][index]


def is_spread(needed: int, own: int | None, free: Sequence[int]) -> bool:
    """Whether weights that one GPU's free bytes do not hold fit those of all GPUs together. Pure."""
    return own is not None and own < needed <= sum(free)


class LayersDisagree(Permanent):
    """Our forward pass does not compute what `transformers` does."""


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
    layers next to them; and under `LOGITS` the logits [CHECKED_LOGITS, V] of the last positions. The model is computed
    on `device` and freed on return. Raises MemoryTooSmall."""
    model = load_causal_model(path, dtype, device)
    wanted = {near for layer in aux_layers for near in (layer - 1, layer, layer + 1)}
    rows = []
    with torch.inference_mode():
        for tokens in token_ids:
            output = model(tokens[None].to(device), output_hidden_states=True)
            states = output.hidden_states
            rows.append({layer: states[layer][0].float().cpu() for layer in wanted if 0 <= layer < len(states)}
                        | {LOGITS: output.logits[0, -CHECKED_LOGITS:].float().cpu()})
    return rows


def compare(ours: Sequence[Tensor], logits: Sequence[Tensor], theirs: Sequence[Mapping[int, Tensor]],
            aux_layers: Sequence[int], dtype: str) -> tuple[LayerAgreement, ...]:
    """Compare aux states [T, A, H] of some rows, and logits [CHECKED_LOGITS, V] of their last positions, on the CPU,
    with the reference's.

    Raises LayersDisagree naming the layers.
    """
    agreements = []
    for column, layer in enumerate(aux_layers):
        mine = torch.cat([aux[:, column].float() for aux in ours])
        errors = {near: _distance(mine, torch.cat([row[near] for row in theirs]))
                  for near in (layer - 1, layer, layer + 1) if near in theirs[0]}
        # The distance to the layers next to it shows that the comparison could have failed.
        agreements.append(LayerAgreement(layer, errors.pop(layer), min(errors.values())))
    # `not <=`: an error that is NaN is wrong too.
    wrong = [agreement for agreement in agreements if not agreement.error <= _AGREEMENT_TOLERANCE[dtype]]
    if wrong:
        errors_shown = ", ".join(f"layer {agreement.layer}: {agreement.error:.2g}" for agreement in wrong)
        raise LayersDisagree(
            f"aux hidden states differ from those of transformers ({errors_shown}; {_AGREEMENT_TOLERANCE[dtype]:g} is "
            f"rounding in {dtype})", "report this target's config.json: its forward pass has something ours lacks; "
            "capture.check_rows 0 leaves the check out")
    # The states agree, so another output matrix, scale or bound is what differs.
    error = _distance(torch.cat([*logits]), torch.cat([row[LOGITS] for row in theirs]))
    if not error <= _AGREEMENT_TOLERANCE[dtype]:
        raise LayersDisagree(
            f"logits differ from those of transformers by {error:.2g} ({_AGREEMENT_TOLERANCE[dtype]:g} is rounding in "
            f"{dtype}), and the states do not", "report this target's config.json: its output matrix, or what scales "
            "or bounds the logits; capture.check_rows 0 leaves the check out")
    return tuple(agreements)

"""The directory of an EAGLE-3 drafter, as SGLang's `LlamaForCausalLMEagle3` loads it: its format, and its validator.

Read in SGLang 0.5.23 (`srt/models/llama_eagle3.py`) and vLLM 0.33 (`model_executor/models/llama_eagle3.py`), which
accepts the same architecture and the same tensors. Where the two differ, one directory satisfies both:

    layers beyond the first   SGLang norms their input with `hidden_norm`, vLLM with `input_layernorm`: equal copies
    d2t, t2d                  left out when the draft vocabulary is the target's: vLLM then refuses them
    layer ids                 one key for each engine (`eyrie_api.planning.sglang_support`)
    sliding window            `sliding_window` and `layer_types` for vLLM; a launch flag for SGLang, one smaller

A window of w includes the current position; SGLang's `--speculative-draft-window-size` counts the positions before it:
w - 1. How exactly the window is applied depends on the draft attention backend (read in its code; intel_amx also run).
fa3 with chains and intel_amx apply it at every step. fa3 with trees counts it from the last settled token instead of
from the node: at depth d, d - 1 keys too many are visible. triton masks one key too many from the second step on.
flashinfer applies it at the first step only, which differs from training.

SGLang reports few errors. The contract is therefore checked completely: export validates what it is about to write,
loading what it reads, and `eyrie certify --check-only` prints the findings. What config.json and the headers of the
tensors decide is in `eyrie_api.planning.eagle3_rules`, which submission applies too; values, card and digests are
checked here. All findings are returned at once, each with a hint.

    D draft vocabulary, V target vocabulary
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eyrie_api.errors import EyrieError
from eyrie_api.planning import eagle3_rules
from eyrie_api.planning.drafter_rules import LAYER_IDS, Finding, Target, error, warning
from eyrie_api.planning.eagle3_rules import MAPS, Shape, canonical_name, nested, shape_of
from eyrie_workers.drafters.card import Card
from eyrie_workers.drafters.checkpoint import headers_of
from eyrie_workers.drafters.validation import ValidationRequest, context_rules, target_rules, value_rules
from eyrie_workers.targets.loading import stored_tensors, weight_files

ENGINES = {"sglang": "0.5.23", "vllm": "0.32.0"}
"""The versions that tests serve drafters with."""


def tensor_value_rules(shape: Shape, stored: Mapping[str, Tensor]) -> Iterator[Finding]:
    """The values of tensors whose names, shapes and dtypes `eagle3_rules` checks."""
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
    for number in range(1, shape.num_layers):
        norms = [tensors.get(f"layers.{number}.{name}.weight") for name in ("hidden_norm", "input_layernorm")]
        if norms[0] is not None and norms[1] is not None and not torch.equal(norms[0], norms[1]):
            yield warning("layer-norm-vllm", f"hidden_norm and input_layernorm of layer {number} differ: SGLang "
                          "applies the first, vLLM the second", "store the trained one under both names")
    yield from value_rules({name: tensor for name, tensor in tensors.items() if name not in MAPS})
    if "d2t" in tensors:
        yield from _vocabulary_rules(shape, tensors["d2t"], tensors.get("t2d"))


def _vocabulary_rules(shape: Shape, d2t: Tensor, t2d: Tensor | None) -> Iterator[Finding]:
    vocab = shape.vocab_size
    if d2t.dtype != torch.int64 or d2t.shape != (shape.draft_vocab_size,):
        return
    if t2d is not None and (t2d.dtype != torch.bool or t2d.shape != (vocab,)):
        t2d = None
    ids = d2t + torch.arange(d2t.numel())
    outside = int(ids.min()) < 0 or int(ids.max()) >= vocab
    # Target ids stored in place of offsets are ascending and in range, and as offsets leave the vocabulary or disagree
    # with t2d.
    like_ids = _ascending(d2t) and int(d2t.min()) >= 0 and int(d2t.max()) < vocab
    agrees = t2d is None or (not outside and _names(ids, t2d))
    if like_ids and (outside or (t2d is not None and not agrees and _names(d2t, t2d))):
        yield error("d2t-absolute", "d2t holds target ids, not offsets: SGLang adds the draft id to each, so token "
                    f"{int(d2t[-1])} would become {int(ids[-1])}", "store d2t - arange(D)")
    elif outside:
        yield error("d2t-range", f"d2t leaves the target's vocabulary of {vocab}: ids {int(ids.min())} to "
                    f"{int(ids.max())}", "d2t holds offsets, target id minus draft id: export the drafter again")
    elif not _ascending(ids):
        yield error("d2t-order", "the target ids of d2t are not strictly ascending",
                    "sort the draft vocabulary, and lm_head's rows with it")
    elif not agrees:
        yield error("t2d-disagrees", "t2d and d2t name different tokens", "export the drafter again")
    elif t2d is None and like_ids and d2t.numel() > 1:
        yield warning("d2t-unconfirmed", "d2t is strictly ascending, as ids are and offsets rarely are, and without "
                      "t2d the two cannot be distinguished", "confirm that it holds offsets, and store t2d")


def _ascending(values: Tensor) -> bool:
    return bool((values.diff() > 0).all())


def _names(ids: Tensor, t2d: Tensor) -> bool:
    """t2d marks exactly these ids."""
    if int(ids.min()) < 0 or int(ids.max()) >= t2d.numel():
        return False
    member = torch.zeros_like(t2d)
    member[ids] = True
    return torch.equal(member, t2d)


_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")


def card_rules(config: Mapping[str, Any], card: Card | None) -> Iterator[Finding]:
    """Settings that do not show in the tensors: config.json against the card, which records how it was trained. Without
    one, a drafter trained with `norm_output` cannot be distinguished from one trained without."""
    if card is None:
        if config.get("norm_output"):
            yield warning("norm-output-unproven", "norm_output is set, and without a card it is unknown whether it was "
                          "trained so (SpecForge 0.2.0 writes the flag and trains without it)",
                          "compare acceptance at the second draft position with and without the flag")
        return
    declared = {
        "norm_output": bool(config.get("norm_output", False)),
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        "norm_before_fc": bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
        "sliding_window": config.get("sliding_window")}
    for key, value in declared.items():
        trained = getattr(card.drafter, key)
        if value != trained:
            yield error("card-disagrees", f"config.json has {key} {value}, but it was trained with {trained}",
                        f"write {key} {str(trained).lower()}; another value lowers acceptance without an error")
    top = config.get(LAYER_IDS)
    if isinstance(top, list) and tuple(top) != card.aux_layers:
        yield error("card-disagrees", f"config.json has states {top}, but it was trained on {list(card.aux_layers)}",
                    "write the layer ids it was trained on")


def embedding_rules(tensors: Mapping[str, Tensor], target: Target) -> Iterator[Finding]:
    """A stored embedding must be the target's: the drafter is served with the target's."""
    own = tensors.get("embed_tokens.weight", tensors.get("model.embed_tokens.weight"))
    if own is None or own.dim() != 2:
        return
    try:
        rows = next((rows for file in weight_files(target.path)
                     for _, rows in stored_tensors(file, _EMBEDDINGS.__contains__)), None)
    except EyrieError:
        return
    if rows is None or own.shape[1] != rows.shape[1]:
        return
    size = min(own.shape[0], rows.shape[0])
    if not torch.equal(own[:size].bfloat16(), rows[:size].bfloat16()):
        yield error("embedding-differs", "embed_tokens.weight is not the target's: SGLang replaces it by the target's, "
                    "which the drafter was not trained on", "train with the target's embedding, frozen")


def validate(request: ValidationRequest) -> Iterator[Finding]:
    config, card, target = request.config, request.card, request.target
    of_card = (None, None) if card is None else (card.target.architecture, card.target.num_layers)
    yield from eagle3_rules.rules(config, headers_of(request.tensors), target, *of_card)
    if eagle3_rules.unreadable(config):
        return
    yield from card_rules(config, card)
    if not eagle3_rules.is_sized(config):
        return
    yield from tensor_value_rules(shape_of(config), request.tensors)
    yield from context_rules(config, target, request.context, card)
    if target is not None:
        yield from target_rules(request, target)
        yield from embedding_rules(request.tensors, target)

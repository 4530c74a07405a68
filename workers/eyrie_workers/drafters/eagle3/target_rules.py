"""Rules for an EAGLE-3 drafter and its target: sizes, rotary embedding, card, and a stored embedding."""

from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.decisions.sglang_support import SGLANG_VERSION, SUPPORTED_BY_SGLANG
from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.checkpoint.card import Card
from eyrie_workers.drafters.eagle3.directory_format import LAYER_IDS, nested
from eyrie_workers.drafters.validation.finding import Finding, error, warning
from eyrie_workers.drafters.validation.target import Target, vocabulary_rules
from eyrie_workers.targets.loading import weight_files

_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")


def size_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Sizes that must equal the target's."""
    text = target.text
    yield from vocabulary_rules(config, target)
    width = config.get("target_hidden_size", config["hidden_size"])
    if width != text.get("hidden_size"):
        yield error("hidden-size-differs", f"the drafter reads states of {width}, the target's are "
                    f"{text.get('hidden_size')}", "serve the drafter with the target it was trained for")
    if target.architecture is not None and target.architecture not in SUPPORTED_BY_SGLANG:
        yield error("target-not-captured", f"SGLang {SGLANG_VERSION} cannot capture hidden states of "
                    f"{target.architecture}", "serve it with Eyrie's own engine, or use a supported target")


def rope_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Rotary embedding. The drafter has its own keys, so another base only gets a warning; M-RoPE sections must
    agree."""
    own, target_rope = _rope(config), _rope(target.text)
    if own.get("mrope_section") != target_rope.get("mrope_section"):
        yield error("rope-sections", f"mrope_section is {own.get('mrope_section')}, the target's "
                    f"{target_rope.get('mrope_section')}: positions come from the target in its form",
                    "export the drafter with the target's rope")
    for key, default in (("rope_theta", None), ("rope_type", "default"), ("factor", 1.0)):
        if own.get(key, default) != target_rope.get(key, default):
            yield warning("rope-differs", f"the drafter's {key} is {own.get(key, default)}, the target's "
                          f"{target_rope.get(key, default)}", "confirm that it was trained with this value")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    found = dict(settings) if isinstance(settings, Mapping) else {}
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    theta = found.get("rope_theta") or config.get("rope_theta")
    return found | ({"rope_theta": float(theta)} if isinstance(theta, int | float) else {})


def card_rules(config: Mapping[str, Any], card: Card) -> Iterator[Finding]:
    """Settings that do not show in the tensors: config.json against the card, which records how it was trained."""
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


def provenance_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Without a card, a drafter trained with `norm_output` cannot be distinguished from one trained without."""
    if config.get("norm_output"):
        yield warning("norm-output-unproven", "norm_output is set, and without a card it is unknown whether it was "
                      "trained so (SpecForge 0.2.0 writes the flag and trains without it)",
                      "compare acceptance at the second draft position with and without the flag")


def embedding_of(target: Target) -> Tensor | None:
    """The target's embedding matrix; None when it is not found."""
    try:
        for file in weight_files(target.path):
            with safe_open(file, framework="pt") as handle:
                for name in set(_EMBEDDINGS) & set(handle.keys()):
                    found: Tensor = handle.get_tensor(name)
                    return found
    except (EyrieError, OSError, SafetensorError):
        return None
    return None

"""A drafter against the target it shall serve, and the context it shall be served with.

The same weights beside another revision, tokenizer or layer count load and run. What can tell is the card written at
export (`card`), by digest; without one, the sizes in both `config.json` have to do. Targets of any family are read, not
only those Eyrie can load: their `config.json` is all that is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.artifacts import digest_file
from eyrie_api.decisions.capture_support import SGLANG_VERSION, SUPPORTED_BY_SGLANG
from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.checkpoint.card import TOKENIZER, Card, hub_revision
from eyrie_workers.drafters.eagle3.directory_format import nested
from eyrie_workers.drafters.validation.finding import Finding, error, warning
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import target_digest, weight_files
from eyrie_workers.targets.sglang_limits import Unlaunchable, context_length

_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")
_HALVES = {"bfloat16", "float16"}


@dataclass(frozen=True)
class Target:
    """What a check needs of a target directory."""

    path: Path
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    @property
    def architecture(self) -> str | None:
        """The class SGLang serves it with."""
        found = self.config.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else None

    @property
    def num_layers(self) -> int | None:
        """Decoder layers of the language model."""
        found = self.text.get("num_hidden_layers")
        return found if isinstance(found, int) else None


def read_target(path: Path) -> Target:
    """The target in directory `path`. Raises TargetNotFound without a config."""
    return Target(path, read_json(path / "config.json"))


def vocabulary_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Whether both speak of the same tokens."""
    if config.get("vocab_size") != target.text.get("vocab_size"):
        yield error("vocab-differs", f"vocab_size is {config.get('vocab_size')}, the target's "
                    f"{target.text.get('vocab_size')}", "serve the drafter with the target it was trained for")


def size_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Numbers that must be the target's."""
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
    """Positions. The drafter has keys of its own, so another base is odd, not wrong; sections of M-RoPE must agree."""
    own, theirs = _rope(config), _rope(target.text)
    if own.get("mrope_section") != theirs.get("mrope_section"):
        yield error("rope-sections", f"mrope_section is {own.get('mrope_section')}, the target's "
                    f"{theirs.get('mrope_section')}: positions come from the target in its own form",
                    "export the drafter with the target's rope")
    for key, default in (("rope_theta", None), ("rope_type", "default"), ("factor", 1.0)):
        if own.get(key, default) != theirs.get(key, default):
            yield warning("rope-differs", f"the drafter's {key} is {own.get(key, default)}, the target's "
                          f"{theirs.get(key, default)}", "make sure it was trained so")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    told = config.get("rope_parameters") or config.get("rope_scaling")
    found = dict(told) if isinstance(told, Mapping) else {}
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    theta = found.get("rope_theta") or config.get("rope_theta")
    return found | ({"rope_theta": float(theta)} if isinstance(theta, int | float) else {})


def context_rules(config: Mapping[str, Any], target: Target | None, context: int | None,
                  card: Card | None) -> Iterator[Finding]:
    """SGLang gives the drafter the target's context length and refuses to start when it has less."""
    own = context_length(config, "the drafter")
    if context is not None and own < context:
        yield error("context-too-short", f"the drafter has {own} positions, {context} shall be served: SGLang refuses "
                    "to start", f"serve with --context-length {own}, or train with drafter.max_position_embeddings "
                    f"{context}")
    if context is None and target is not None:
        try:
            theirs = context_length(target.text, "the target")
        except Unlaunchable:
            theirs = own
        if own < theirs:
            yield warning("context-shorter-than-target", f"the drafter has {own} positions, the target {theirs}: "
                          "SGLang refuses to start without a context length", f"serve with --context-length {own}")
    asked = context or own
    longest = card.data.longest_row if card is not None and card.data is not None else None
    if longest and asked > 4 * longest and config.get("sliding_window") is None:
        yield warning("context-beyond-training", f"trained on texts of up to {longest} tokens, served up to {asked}: "
                      "acceptance falls along the way", "train on longer conversations, or with "
                      "drafter.sliding_window")


def dtype_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """One server has one dtype: with `--dtype auto` each config gives its own, and float32 becomes float16."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    theirs = str(target.text.get("dtype") or target.text.get("torch_dtype") or target.config.get("dtype")
                 or target.config.get("torch_dtype") or "float32")
    quantised = target.config.get("quantization_config")
    if quantised is not None:
        yield warning("target-quantised", "the target is quantised: SGLang's --quantization would hold for the drafter "
                      "too", "add --speculative-draft-model-quantization unquant when you pass --quantization")
    if own != theirs and {own, theirs} & _HALVES:
        yield warning("dtype-differs", f"the drafter is stored as {own}, the target as {theirs}: with --dtype auto "
                      "SGLang loads each in its own, float32 as float16",
                      f"name one at launch: --dtype {_half(theirs)}")


def _half(dtype: str) -> str:
    return dtype if dtype in _HALVES else "bfloat16"


def identity_rules(card: Card | None, target: Target, drafter_dir: Path, *, weights: bool) -> Iterator[Finding]:
    """Whether it is the very target. `weights`: also its weights, which means reading them all."""
    tokenizer = target.path / TOKENIZER
    theirs = digest_file(tokenizer) if tokenizer.is_file() else None
    shipped = drafter_dir / TOKENIZER
    if shipped.is_file() and theirs is not None and digest_file(shipped) != theirs:
        yield error("tokenizer-differs", "the tokenizer.json beside the drafter is not the target's",
                    "serve the drafter with the target it was trained for")
    if card is None:
        yield warning("no-card", "the drafter has no card: nothing tells whether this is the target it was trained on",
                      "measure its acceptance before serving; drafters Eyrie exports carry one")
        return
    if card.target.tokenizer_digest is not None and card.target.tokenizer_digest != theirs:
        yield error("tokenizer-differs", f"trained with tokenizer {_short(card.target.tokenizer_digest)}, the target "
                    f"has {_short(theirs) if theirs else 'none'}",
                    "serve the drafter with the target it was trained for")
    revision = hub_revision(target.path)
    if card.target.revision and revision and card.target.revision != revision:
        yield error("revision-differs", f"trained on revision {card.target.revision[:12]}, the target is "
                    f"{revision[:12]}", "serve that revision, or train again on this one")
    for key, ours, other in (("architecture", card.target.architecture, target.architecture),
                             ("number of layers", card.target.num_layers, target.num_layers)):
        if other is not None and ours != other:
            yield error("target-differs", f"trained on a target of {key} {ours}, this one has {other}",
                        "serve the drafter with the target it was trained for")
    if weights:
        try:
            digest = target_digest(target.path)
        except EyrieError as fault:
            yield warning("target-unread", f"the target's weights cannot be compared: {fault.message}", fault.hint)
            return
        if digest != card.target.digest:
            yield error("target-differs", f"trained on the target {_short(card.target.digest)}, this one is "
                        f"{_short(digest)}: its weights, configuration or template changed",
                        "serve the drafter with the target it was trained for, or train again on this one")


def card_rules(config: Mapping[str, Any], card: Card) -> Iterator[Finding]:
    """Settings that leave no trace in the tensors: what the card says was trained against what config.json says."""
    said = {"norm_output": bool(config.get("norm_output", False)),
            "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
            "norm_before_fc": bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
            "sliding_window": config.get("sliding_window")}
    for key, value in said.items():
        trained = getattr(card.drafter, key)
        if value != trained:
            yield error("card-disagrees", f"config.json says {key} {value}, but it was trained with {trained}",
                        f"write {key} {str(trained).lower()}; serving what was not trained costs acceptance, silently")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(top, list) and tuple(top) != card.aux_layers:
        yield error("card-disagrees", f"config.json says states {top}, but it was trained on {list(card.aux_layers)}",
                    "write the layer ids it was trained on")


def provenance_rules(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Without a card a post-norm drafter cannot be told from a plain one."""
    if config.get("norm_output"):
        yield warning("norm-output-unproven", "norm_output is set, and no card tells whether it was trained so "
                      "(SpecForge 0.2.0 writes the flag and trains without it)",
                      "compare acceptance at the second draft position with and without the flag")


def embedding_of(target: Target) -> Tensor | None:
    """The target's embedding; None where it cannot be found."""
    try:
        for file in weight_files(target.path):
            with safe_open(file, framework="pt") as handle:
                for name in set(_EMBEDDINGS) & set(handle.keys()):
                    found: Tensor = handle.get_tensor(name)
                    return found
    except (EyrieError, OSError, SafetensorError):
        return None
    return None


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]

"""Rules for the pair of a drafter and a target, and for the context length they are served with.

A drafter loads and runs next to another revision, tokenizer or layer count of its target. The card written at export
identifies the target by digest; without a card only the sizes in the two `config.json` can be compared. Only the
target's `config.json` is needed, so that targets Eyrie cannot load are checked too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import digest_file
from eyrie_api.decisions.capture_support import Unlaunchable, context_length
from eyrie_api.errors import EyrieError
from eyrie_workers.drafters.checkpoint.card import TOKENIZER, Card, hub_revision
from eyrie_workers.drafters.validation.finding import Finding, error, warning
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import target_digest

_HALVES = {"bfloat16", "float16"}


@dataclass(frozen=True)
class Target:
    """The `config.json` of a target directory."""

    path: Path
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, Mapping) else self.config

    @property
    def architecture(self) -> str | None:
        """Name of the model class in SGLang."""
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
    """The vocabularies have the same size."""
    if config.get("vocab_size") != target.text.get("vocab_size"):
        yield error("vocab-differs", f"vocab_size is {config.get('vocab_size')}, the target's "
                    f"{target.text.get('vocab_size')}", "serve the drafter with the target it was trained for")


def context_rules(config: Mapping[str, Any], target: Target | None, context: int | None,
                  card: Card | None) -> Iterator[Finding]:
    """Context lengths. SGLang gives the drafter the target's context length and does not start when it has less."""
    own = context_length(config, "the drafter")
    if context is not None and own < context:
        yield error("context-too-short", f"the drafter has {own} positions, {context} are to be served: SGLang does "
                    "not start", f"serve with --context-length {own}, or train with drafter.max_position_embeddings "
                    f"{context}")
    if context is None and target is not None:
        try:
            target_length = context_length(target.text, "the target")
        except Unlaunchable:
            target_length = own
        if own < target_length:
            yield warning("context-shorter-than-target", f"the drafter has {own} positions, the target "
                          f"{target_length}: SGLang does not start without a context length",
                          f"serve with --context-length {own}")
    served = context or own
    longest = card.data.longest_row if card is not None and card.data is not None else None
    if longest and served > 4 * longest and config.get("sliding_window") is None:
        yield warning("context-beyond-training", f"trained on texts of up to {longest} tokens, served up to {served}: "
                      "acceptance falls with the position", "train on longer conversations, or with "
                      "drafter.sliding_window")


def dtype_rules(config: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Dtypes. A server has one: with `--dtype auto` each config declares its own, and float32 becomes float16."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    target_dtype = str(target.text.get("dtype") or target.text.get("torch_dtype") or target.config.get("dtype")
                       or target.config.get("torch_dtype") or "float32")
    quantised = target.config.get("quantization_config")
    if quantised is not None:
        yield warning("target-quantised", "the target is quantised: SGLang's --quantization would apply to the drafter "
                      "too", "add --speculative-draft-model-quantization unquant when you pass --quantization")
    if own != target_dtype and {own, target_dtype} & _HALVES:
        yield warning("dtype-differs", f"the drafter is stored as {own}, the target as {target_dtype}: with --dtype "
                      "auto SGLang loads each in its own, float32 as float16",
                      f"name one at launch: --dtype {_half(target_dtype)}")


def _half(dtype: str) -> str:
    return dtype if dtype in _HALVES else "bfloat16"


def identity_rules(card: Card | None, target: Target, drafter_dir: Path, *, compare_weights: bool) -> Iterator[Finding]:
    """The target is the one the drafter was trained on. `compare_weights` includes its weights, which reads them
    all."""
    tokenizer, shipped = target.path / TOKENIZER, drafter_dir / TOKENIZER
    tokenizer_digest = digest_file(tokenizer) if tokenizer.is_file() else None
    if shipped.is_file() and tokenizer_digest is not None and digest_file(shipped) != tokenizer_digest:
        yield error("tokenizer-differs", "the tokenizer.json in the drafter's directory is not the target's",
                    "serve the drafter with the target it was trained for")
    if card is None:
        yield warning("no-card", "the drafter has no card: whether this is the target it was trained on is unknown",
                      "measure its acceptance before serving; drafters Eyrie exports have a card")
        return
    if card.target.tokenizer_digest is not None and card.target.tokenizer_digest != tokenizer_digest:
        yield error("tokenizer-differs", f"trained with tokenizer {_short(card.target.tokenizer_digest)}, the target "
                    f"has {_short(tokenizer_digest) if tokenizer_digest else 'none'}",
                    "serve the drafter with the target it was trained for")
    revision = hub_revision(target.path)
    if card.target.revision and revision and card.target.revision != revision:
        yield error("revision-differs", f"trained on revision {card.target.revision[:12]}, the target is "
                    f"{revision[:12]}", "serve that revision, or train again on this one")
    for key, trained, actual in (("architecture", card.target.architecture, target.architecture),
                             ("number of layers", card.target.num_layers, target.num_layers)):
        if actual is not None and trained != actual:
            yield error("target-differs", f"trained on a target of {key} {trained}, this one has {actual}",
                        "serve the drafter with the target it was trained for")
    if compare_weights:
        try:
            digest = target_digest(target.path)
        except EyrieError as fault:
            yield warning("target-unread", f"the target's weights cannot be compared: {fault.message}", fault.hint)
            return
        if digest != card.target.digest:
            yield error("target-differs", f"trained on the target {_short(card.target.digest)}, this one is "
                        f"{_short(digest)}: its weights, configuration or template changed",
                        "serve the drafter with the target it was trained for, or train again on this one")


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]

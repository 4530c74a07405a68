"""Validation of drafter directories: validators, and the rules over tensors, card and target that hold for every
family. Rules over config.json alone are in `eyrie_api.planning.drafter_rules`.

EAGLE-3 has a validator of its own (`drafters.eagle3.directory`). The loaders of the other families refuse everything
that breaks the contract, so they are validated by loading (`rules_by_loading`).

A drafter loads and runs next to another revision, tokenizer or layer count of its target. The card written at export
identifies the target by digest; without a card only the sizes in the two `config.json` can be compared. Only the
target's `config.json` is needed, so that targets Eyrie cannot load are checked too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eyrie_api.artifacts import digest_file
from eyrie_api.errors import EyrieError
from eyrie_api.planning.drafter_rules import DTYPES, Finding, Target, error, vocabulary_rules, warning
from eyrie_api.planning.sglang_support import MTP_ARCHITECTURES, Unlaunchable, context_length
from eyrie_workers.drafters.card import TOKENIZER, Card, hub_revision
from eyrie_workers.targets.config import TargetConfig, describe_config
from eyrie_workers.targets.loading import target_digest


def value_rules(parameters: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Non-finite values, and matrices whose elements are all equal. Tensors of other dtypes are skipped."""
    for name, tensor in sorted(parameters.items()):
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.numel() == 0:
            continue
        least, most = tensor.min().item(), tensor.max().item()
        if not abs(least) + abs(most) < float("inf"):  # nan compares false
            yield error("not-finite", f"{name} holds nan or infinity", "take an earlier checkpoint; training diverged")
        elif tensor.dim() > 1 and least == most:
            yield error("constant-tensor", f"every element of {name} is {least:g}: it was never trained or written",
                        "export the drafter again")


_HALVES = {"bfloat16", "float16"}


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


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class ValidationRequest:
    """The contents of a drafter directory, read or about to be written, and the target and context to validate it for.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the names in the file."""

    card: Card | None = None
    directory: Path = Path()
    target: Target | None = None
    """The model to serve; None: validated without one, with what the card records of it."""

    context: int | None = None
    """Context length in tokens it will be served with; None: the limits of the two configs."""

    compare_weights: bool = True
    """Compare the digest of the target's weights with the card, which reads all of them."""


Validator = Callable[[ValidationRequest], Iterator[Finding]]
"""All findings about a drafter of a family's architecture."""


def rules_by_loading(family: str, load: Callable[[Path, TargetConfig | None], object],
                     request: ValidationRequest) -> Iterator[Finding]:
    """Findings about a drafter whose `FamilyImplementation.load` refuses what breaks the contract of its family."""
    config, card, target = request.config, request.card, request.target
    if card is not None and card.family != family:
        yield error("card-disagrees", f"its card is of a {card.family} drafter, its config.json of a {family} one",
                    "export the drafter again")
    try:
        load(request.directory, None if target is None else describe_config(target.config))
    except EyrieError as fault:
        yield error("contract", fault.message, fault.hint)
        return
    yield from value_rules(request.tensors)
    if "max_position_embeddings" in config:
        yield from context_rules(config, target, request.context, card)
    if target is not None:
        yield from vocabulary_rules(config, target)
        yield from target_rules(request, target)


def target_rules(request: ValidationRequest, target: Target) -> Iterator[Finding]:
    """What every family requires of the target, besides its own sizes: a dtype that one server has for both, and that
    it is the target the drafter was trained on."""
    config, card = request.config, request.card
    # 1. A server has one dtype: with `--dtype auto` each config declares its own, and float32 becomes float16.
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
                      f"name one at launch: --dtype {target_dtype if target_dtype in _HALVES else 'bfloat16'}")
    # 2. The target's identity.
    tokenizer, shipped = target.path / TOKENIZER, request.directory / TOKENIZER
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
    if request.compare_weights:
        try:
            digest = target_digest(target.path)
        except EyrieError as fault:
            yield warning("target-unread", f"the target's weights cannot be compared: {fault.message}", fault.hint)
            return
        if digest != card.target.digest:
            yield error("target-differs", f"trained on the target {_short(card.target.digest)}, this one is "
                        f"{_short(digest)}: its weights, configuration or template changed",
                        "serve the drafter with the target it was trained for, or train again on this one")


def check_mtp_layers(config: Mapping[str, Any], target: Target | None) -> Iterator[Finding]:
    """Whether SGLang drafts with them, and whether they are of `target`."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in MTP_ARCHITECTURES:
        yield error("architecture-unknown", f"it holds MTP layers of {name}, which SGLang does not draft with",
                    f"MTP layers of {', '.join(MTP_ARCHITECTURES)} are served")
    if target is None:
        return
    if target.architecture != name:
        yield error("target-differs", f"it holds MTP layers of {name}, the target is {target.architecture}",
                    "serve them with the target they were copied from")
    text = config.get("text_config")
    yield from vocabulary_rules(text if isinstance(text, Mapping) else config, target)

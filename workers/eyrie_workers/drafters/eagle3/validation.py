"""The validator of EAGLE-3 directories.

SGLang's loader reports few errors: it skips unknown tensors, leaves missing ones at their initial values, and then
serves the drafter with an acceptance near zero. The contract is therefore checked here, completely and in one place:
export validates what it is about to write, loading what it reads, and `eyrie check-drafter` prints the findings. All
findings are returned at once, each with a hint.

    config_rules    `config.json` without a target: keys, flags, layer ids, window, rope
    tensor_rules    names, shapes, dtypes, vocabulary maps, values
    target_rules    the pair: sizes, rope, card; with `drafters.validation.target`: tokenizer, revision, digest, context
"""

from collections.abc import Iterator
from pathlib import Path

from eyrie_workers.drafters.eagle3 import config_rules, target_rules, tensor_rules
from eyrie_workers.drafters.eagle3.directory_format import shape_of
from eyrie_workers.drafters.validation.finding import Finding, errors_first
from eyrie_workers.drafters.validation.target import Target, context_rules, dtype_rules, identity_rules
from eyrie_workers.drafters.validation.validator import DrafterFiles, ValidationRequest


def validate(request: ValidationRequest) -> tuple[Finding, ...]:
    """Findings about a directory (`validation.validator.Validator`)."""
    return validate_files(request.files, target=request.target, context=request.context,
                          drafter_dir=request.directory, compare_weights=request.compare_weights)


def validate_files(files: DrafterFiles, *, target: Target | None = None, context: int | None = None,
                   drafter_dir: Path | None = None, compare_weights: bool = True) -> tuple[Finding, ...]:
    """Findings about a drafter, errors first.

    target           the model to serve; None: the drafter is validated without one, with what its card records of it
    context          context length in tokens; None: the limits of the two configs
    compare_weights  compare the digest of the target's weights with the card, which reads all of them
    """
    return errors_first([*_findings(files, target, context, drafter_dir, compare_weights=compare_weights)])


def _findings(files: DrafterFiles, target: Target | None, context: int | None, drafter_dir: Path | None, *,
              compare_weights: bool) -> Iterator[Finding]:
    config, card = files.config, files.card
    unreadable = [*config_rules.architecture_rules(config)] or [*config_rules.kind_rules(config)]
    if unreadable:
        yield from unreadable
        return
    keys = [*config_rules.key_rules(config)]
    yield from keys
    yield from config_rules.flag_rules(config)
    yield from config_rules.norm_rules(config)
    architecture = target.architecture if target else card.target.architecture if card else None
    num_layers = target.num_layers if target else card.target.num_layers if card else None
    yield from config_rules.layer_rules(config, architecture, num_layers)
    yield from config_rules.window_rules(config)
    yield from config_rules.rope_rules(config)
    yield from target_rules.card_rules(config, card) if card else target_rules.provenance_rules(config)
    if any(finding.severity == "error" for finding in keys):
        return  # the tensor shapes depend on these keys
    yield from config_rules.size_rules(config)
    shares_head = "draft_vocab_size" in config and config["draft_vocab_size"] is None
    yield from tensor_rules.tensor_rules(shape_of(config), shares_head, files.tensors)
    yield from context_rules(config, target, context, card)
    if target is not None:
        yield from target_rules.size_rules(config, target)
        yield from target_rules.rope_rules(config, target)
        yield from dtype_rules(config, target)
        yield from identity_rules(card, target, drafter_dir or Path(), compare_weights=compare_weights)
        if any("embed_tokens" in name for name in files.tensors):
            yield from tensor_rules.embedding_rules(files.tensors, target_rules.embedding_of(target))

"""Everything that is wrong with an EAGLE-3 directory, before an engine finds out, or does not.

SGLang's loader is silent: what it does not know it skips, what it misses stays at initialisation, and the drafter
serves with an acceptance near zero and no error. So the contract is checked here, in full and in one place: export
checks what it is about to write, loading checks what it reads, and `eyrie check-drafter` tells a person. All of it is
said at once, each finding with its hint; a check that ends at the first fault is asked five times.

    check_config    keys, flags, layer ids, window, rope: `config.json` by itself
    check_tensors   names, shapes, dtypes, vocabulary, numbers
    check_target    the pair: sizes, tokenizer, revision, digest, context, dtype, and the card

Pure: (drafter, target or None, context or None) -> findings.
"""

from collections.abc import Iterator
from pathlib import Path

from eyrie_workers.drafters.eagle3.directory_format import shape_of
from eyrie_workers.drafters.validation import config as check_config
from eyrie_workers.drafters.validation import target as check_target
from eyrie_workers.drafters.validation import tensors
from eyrie_workers.drafters.validation.family_checks import Examined, Parts
from eyrie_workers.drafters.validation.finding import Finding
from eyrie_workers.drafters.validation.target import Target


def examine(one: Examined) -> tuple[Finding, ...]:
    """`check` of a directory."""
    return check(one.parts, target=one.target, context=one.context, drafter_dir=one.directory, weights=one.weights)


def check(parts: Parts, *, target: Target | None = None, context: int | None = None,
          drafter_dir: Path | None = None, weights: bool = True) -> tuple[Finding, ...]:
    """Findings about a drafter; errors first.

    target   the model it shall serve; None judges the drafter by itself, with what its card says of the target
    context  tokens it shall be served with; None: whatever the two configs allow
    weights  also compare the target's weights with the card, which reads them all
    """
    found = [*_findings(parts, target, context, drafter_dir, weights=weights)]
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def _findings(parts: Parts, target: Target | None, context: int | None, drafter_dir: Path | None, *,
              weights: bool) -> Iterator[Finding]:
    config, card = parts.config, parts.card
    strange = [*check_config.architecture_rules(config)] or [*check_config.kind_rules(config)]
    if strange:
        yield from strange
        return
    keys = [*check_config.key_rules(config)]
    yield from keys
    yield from check_config.flag_rules(config)
    yield from check_config.norm_rules(config)
    architecture = target.architecture if target else card.target.architecture if card else None
    num_layers = target.num_layers if target else card.target.num_layers if card else None
    yield from check_config.layer_rules(config, architecture, num_layers)
    yield from check_config.window_rules(config)
    yield from check_config.rope_rules(config)
    yield from check_target.card_rules(config, card) if card else check_target.provenance_rules(config)
    if any(finding.severity == "error" for finding in keys):
        return  # shapes hang on these
    yield from check_config.size_rules(config)
    shares_head = "draft_vocab_size" in config and config["draft_vocab_size"] is None
    yield from tensors.tensor_rules(shape_of(config), shares_head, parts.tensors)
    yield from check_target.context_rules(config, target, context, card)
    if target is not None:
        yield from check_target.size_rules(config, target)
        yield from check_target.rope_rules(config, target)
        yield from check_target.dtype_rules(config, target)
        yield from check_target.identity_rules(card, target, drafter_dir or Path(), weights=weights)
        if any("embed_tokens" in name for name in parts.tensors):
            yield from tensors.embedding_rules(parts.tensors, check_target.embedding_of(target))

"""`check`: everything that is wrong with a drafter directory, before an engine finds out, or does not.

SGLang's loader is silent: what it does not know it skips, what it misses stays at initialisation, and the drafter
serves with an acceptance near zero and no error. So the contract is checked here, in full and in one place: export
checks what it is about to write, loading checks what it reads, and `eyrie check-drafter` tells a person. All of it is
said at once, each finding with its mend; a check that ends at the first fault is asked five times.

    check_config    keys, flags, layer ids, window, rope: `config.json` by itself
    check_tensors   names, shapes, dtypes, vocabulary, numbers
    check_target    the pair: sizes, tokenizer, revision, digest, context, dtype, and the card

Pure but for reading the directories: (drafter, target or None, context or None) -> findings.

    python -m eyrie_workers.drafters.check DIR [--target DIR] [--context N] [--fast]     findings as JSON; 0 or 65
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.job import TargetSpec
from eyrie_workers.drafters import check_config, check_target, check_tensors
from eyrie_workers.drafters.card import Card, read_card
from eyrie_workers.drafters.check_target import Target, read_target
from eyrie_workers.drafters.contract import CONFIG, ENGINES, WEIGHTS, shape_of
from eyrie_workers.drafters.finding import Finding, error, warning
from eyrie_workers.targets.loading import resolve

EXIT_DEFECTIVE = 65  # EX_DATAERR
_PICKLED = ("pytorch_model.bin", "model.pt", "model.ckpt")


@dataclass(frozen=True)
class Parts:
    """A drafter as it lies on disk, or as it is about to be written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the names they are stored under."""

    card: Card | None = None


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
    yield from check_tensors.tensor_rules(shape_of(config), shares_head, parts.tensors)
    yield from check_target.context_rules(config, target, context, card)
    if target is not None:
        yield from check_target.size_rules(config, target)
        yield from check_target.rope_rules(config, target)
        yield from check_target.dtype_rules(config, target)
        yield from check_target.identity_rules(card, target, drafter_dir or Path(), weights=weights)
        if any("embed_tokens" in name for name in parts.tensors):
            yield from check_tensors.embedding_rules(parts.tensors, check_target.embedding_of(target))


def check_directory(directory: Path, *, target_dir: Path | None = None, context: int | None = None,
                    weights: bool = True, engines: Mapping[str, str] = ENGINES) -> tuple[Finding, ...]:
    """Findings about the drafter in `directory`. Raises TargetNotFound for a target that is none."""
    target = read_target(target_dir) if target_dir is not None else None
    unread = tuple(warning("engine-version", f"these rules were read in {name} {ENGINES.get(name, '(none)')}, not "
                           f"{version}", "try the drafter there before serving it; rules may have changed")
                   for name, version in engines.items() if not version.startswith(ENGINES.get(name, "none")))
    config, faults = _read_config(directory)
    if config is None:
        return (*faults, *unread)
    if strange := tuple(check_config.architecture_rules(config)):
        return (*strange, *unread)
    tensors, more = _read_tensors(directory)
    if tensors is None:
        return (*more, *unread)
    card: Card | None = None
    try:
        card = read_card(directory)
    except EyrieError as fault:
        unread = (error("card-unreadable", fault.message, fault.mend), *unread)
    found = check(Parts(config, tensors, card), target=target, context=context, drafter_dir=directory,
                  weights=weights)
    return tuple(sorted((*found, *unread), key=lambda finding: finding.severity != "error"))


def _read_config(directory: Path) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text())
    except OSError:
        return None, (error("config-missing", f"{file} is missing", "give the directory of an exported drafter"),)
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        return None, (error("config-unreadable", f"{file} is not JSON: {fault}", "export the drafter again"),)
    if not isinstance(config, dict):
        return None, (error("config-unreadable", f"{file} is not a JSON object", "export the drafter again"),)
    return config, ()


def _read_tensors(directory: Path) -> tuple[dict[str, Tensor] | None, tuple[Finding, ...]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [name for name in _PICKLED if (directory / name).exists()]
        what = f"the weights are pickled ({pickled[0]})" if pickled else f"{directory / WEIGHTS} is missing"
        return None, (error("weights-missing", what, "store them as model.safetensors" if pickled
                            else "give the directory of an exported drafter"),)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as fault:
            return None, (error("weights-unreadable", f"{file} is not a readable safetensors file: {fault}",
                                "copy or export the drafter again"),)
    return tensors, ()


def main(arguments: list[str] | None = None) -> int:
    """The command line in the module's essay. `eyrie check-drafter` runs it and renders what it prints."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.check")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", help="directory, Hub id, or quickstart")
    parser.add_argument("--revision")
    parser.add_argument("--context", type=int, help="tokens it shall be served with")
    parser.add_argument("--fast", action="store_true", help="do not read the target's weights")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VERSION")
    given = parser.parse_args(arguments)
    engines = dict(pair.split("=", 1) for pair in given.engine if "=" in pair) or ENGINES
    try:
        target = resolve(TargetSpec(model=given.target, revision=given.revision)) if given.target else None
        found = check_directory(given.directory, target_dir=target, context=given.context, weights=not given.fast,
                                engines=engines)
    except EyrieError as fault:
        print(json.dumps({"error": {"reason": fault.reason, "message": fault.message, "mend": fault.mend,
                                    "exit_code": fault.exit_code}}))
        return fault.exit_code
    print(json.dumps({"drafter": str(given.directory), "target": given.target, "context": given.context,
                      "engines": dict(engines), "findings": [finding.as_json() for finding in found]}, indent=2))
    return EXIT_DEFECTIVE if any(finding.severity == "error" for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())

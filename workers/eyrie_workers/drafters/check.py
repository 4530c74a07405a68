"""Validate a drafter directory before it is served: the program of `eyrie certify --check-only`.

The architecture in `config.json` identifies the family, whose validator (`drafters.validation`) returns the
findings: for EAGLE-3 all defects that SGLang and vLLM load without an error (`drafters.eagle3.directory`); for the
other families whether Eyrie loads it, with exactly the tensors its config implies, and whether it fits the target.

    python -m eyrie_workers.drafters.check DIR [--target DIR] [--context N] [--fast]     findings as JSON; exit 0 or 65
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError
from eyrie_api.planning.drafter_rules import Finding, Target, error, warning
from eyrie_api.planning.eagle3_rules import architecture_rules, author_format_rules
from eyrie_api.planning.sglang_support import holds_mtp_layers
from eyrie_workers.drafters.card import WEIGHTS, Card, read_card
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, headers_of, read_config
from eyrie_workers.drafters.eagle3.directory import ENGINES
from eyrie_workers.drafters.family import family_of
from eyrie_workers.drafters.validation import ValidationRequest, check_mtp_layers, rules_by_loading
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import resolve, stored_tensors

EXIT_DEFECTIVE = 65  # EX_DATAERR
_PICKLED = ("pytorch_model.bin", "model.pt", "model.ckpt")


def check_directory(directory: Path, *, target_dir: Path | None = None, context: int | None = None,
                    compare_weights: bool = True, engines: Mapping[str, str] = ENGINES) -> tuple[Finding, ...]:
    """Findings about the drafter in `directory`, errors first. Raises TargetNotFound when `target_dir` has no config.

    context          context length in tokens; None: the limits of the two configs
    compare_weights  compare the digest of the target's weights with the card, which reads all of them
    engines          versions of the engines to serve it with
    """
    target = Target(target_dir, read_json(target_dir / "config.json")) if target_dir is not None else None
    general = [warning("engine-version", f"these rules are tested with {name} {ENGINES.get(name, '(none)')}, not "
                       f"{version}", "try the drafter there before serving it; rules may have changed")
               for name, version in engines.items() if not version.startswith(ENGINES.get(name, "none"))]
    try:
        config = read_config(directory)
    except (ArtifactMissing, CheckpointInvalid) as fault:
        code = "config-missing" if isinstance(fault, ArtifactMissing) else "config-unreadable"
        return error(code, fault.message, fault.hint), *general
    if holds_mtp_layers(config):
        general.extend(check_mtp_layers(config, target))
    family = family_of(config)
    if family is None and holds_mtp_layers(config):
        return _errors_first(general)
    if family is None:
        return (*architecture_rules(config), *general)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [name for name in _PICKLED if (directory / name).exists()]
        what = f"the weights are pickled ({pickled[0]})" if pickled else f"{directory / WEIGHTS} is missing"
        return error("weights-missing", what, "store them as model.safetensors" if pickled
                     else "give the directory of an exported drafter"), *general
    try:
        tensors = dict(chain.from_iterable(map(stored_tensors, files)))
    except ArtifactCorrupt as fault:
        return error("weights-unreadable", fault.message, "copy or export the drafter again"), *general
    card: Card | None = None
    try:
        card = read_card(directory)
    except EyrieError as fault:
        general.insert(0, error("card-unreadable", fault.message, fault.hint))
    findings: Iterable[Finding] = [*author_format_rules(config, headers_of(tensors))]
    if not findings:
        request = ValidationRequest(config, tensors, card, directory, target, context, compare_weights)
        findings = (rules_by_loading(family.name, family.load, request) if family.validate is None
                    else family.validate(request))
    return _errors_first([*findings, *general])


def _errors_first(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))


def main(arguments: list[str] | None = None) -> int:
    """The command line in the module docstring. `eyrie certify --check-only` runs it and renders its output."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.check")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", help="directory, Hub id, or quickstart")
    parser.add_argument("--revision")
    parser.add_argument("--context", type=int, help="context length to serve it with, in tokens")
    parser.add_argument("--fast", action="store_true", help="do not read the target's weights")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VERSION")
    options = parser.parse_args(arguments)
    engines = dict(pair.split("=", 1) for pair in options.engine if "=" in pair) or ENGINES
    try:
        target = resolve(TargetSpec(model=options.target, revision=options.revision)) if options.target else None
        findings = check_directory(options.directory, target_dir=target, context=options.context,
                                compare_weights=not options.fast, engines=engines)
    except EyrieError as fault:
        print(json.dumps({"error": {"reason": fault.reason, "message": fault.message, "hint": fault.hint,
                                    "exit_code": fault.exit_code}}))
        return fault.exit_code
    print(json.dumps({"drafter": str(options.directory), "target": options.target, "context": options.context,
                      "engines": dict(engines), "findings": [asdict(finding) for finding in findings]}, indent=2))
    return EXIT_DEFECTIVE if any(finding.severity == "error" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Validate a drafter directory before it is served: the program of `eyrie check-drafter`.

The architecture in `config.json` identifies the family, whose validator (`drafters.validation.validator`) returns the
findings: for EAGLE-3 all defects that SGLang and vLLM load without an error (`drafters.eagle3.validation`); for the
other families whether Eyrie loads it, with exactly the tensors its config implies, and whether it fits the target.

    python -m eyrie_workers.drafters.check DIR [--target DIR] [--context N] [--fast]     findings as JSON; exit 0 or 65
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.decisions.sglang_support import holds_mtp_layers
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.drafters.checkpoint.card import Card, read_card
from eyrie_workers.drafters.checkpoint.file_format import CONFIG, WEIGHTS
from eyrie_workers.drafters.eagle3.config_rules import architecture_rules, author_format_rules
from eyrie_workers.drafters.eagle3.directory_format import ENGINES
from eyrie_workers.drafters.registry import family_of
from eyrie_workers.drafters.validation.finding import Finding, error, errors_first, warning
from eyrie_workers.drafters.validation.mtp_layers import check_mtp_layers
from eyrie_workers.drafters.validation.target import read_target
from eyrie_workers.drafters.validation.validator import DrafterFiles, ValidationRequest
from eyrie_workers.targets.loading import resolve

EXIT_DEFECTIVE = 65  # EX_DATAERR
_PICKLED = ("pytorch_model.bin", "model.pt", "model.ckpt")


def check_directory(directory: Path, *, target_dir: Path | None = None, context: int | None = None,
                    compare_weights: bool = True, engines: Mapping[str, str] = ENGINES) -> tuple[Finding, ...]:
    """Findings about the drafter in `directory`, errors first. Raises TargetNotFound when `target_dir` has no config.

    context          context length in tokens; None: the limits of the two configs
    compare_weights  compare the digest of the target's weights with the card, which reads all of them
    engines          versions of the engines to serve it with
    """
    target = read_target(target_dir) if target_dir is not None else None
    general = [warning("engine-version", f"these rules are tested with {name} {ENGINES.get(name, '(none)')}, not "
                       f"{version}", "try the drafter there before serving it; rules may have changed")
               for name, version in engines.items() if not version.startswith(ENGINES.get(name, "none"))]
    config, config_findings = _read_config(directory)
    if config is None:
        return (*config_findings, *general)
    if holds_mtp_layers(config):
        return errors_first([*check_mtp_layers(config, target), *general])
    family = family_of(config.get("architectures"))
    if family is None:
        return (*architecture_rules(config), *general)
    tensors, tensor_findings = _read_tensors(directory)
    if tensors is None:
        return (*tensor_findings, *general)
    card: Card | None = None
    try:
        card = read_card(directory)
    except EyrieError as fault:
        general.insert(0, error("card-unreadable", fault.message, fault.hint))
    findings: Sequence[Finding] = tuple(author_format_rules(config, tensors)) or family.validate(
        ValidationRequest(directory, DrafterFiles(config, tensors, card), target, context, compare_weights))
    return errors_first([*findings, *general])


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
    """The command line in the module docstring. `eyrie check-drafter` runs it and renders its output."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.check")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", help="directory, Hub id, or quickstart")
    parser.add_argument("--revision")
    parser.add_argument("--context", type=int, help="context length to serve it with, in tokens")
    parser.add_argument("--fast", action="store_true", help="do not read the target's weights")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VERSION")
    given = parser.parse_args(arguments)
    engines = dict(pair.split("=", 1) for pair in given.engine if "=" in pair) or ENGINES
    try:
        target = resolve(TargetSpec(model=given.target, revision=given.revision)) if given.target else None
        found = check_directory(given.directory, target_dir=target, context=given.context,
                                compare_weights=not given.fast, engines=engines)
    except EyrieError as fault:
        print(json.dumps({"error": {"reason": fault.reason, "message": fault.message, "hint": fault.hint,
                                    "exit_code": fault.exit_code}}))
        return fault.exit_code
    print(json.dumps({"drafter": str(given.directory), "target": given.target, "context": given.context,
                      "engines": dict(engines), "findings": [finding.as_json() for finding in found]}, indent=2))
    return EXIT_DEFECTIVE if any(finding.severity == "error" for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())

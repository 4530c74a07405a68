"""`check`: everything that is wrong with a drafter directory, before an engine finds out, or does not.

Its architecture says which family it is of, and the family's row (`drafters.family`) knows what to hold it to: for
EAGLE-3 all that SGLang and vLLM would swallow without a word (`eagle3_check`), for the others that Eyrie reads it, with
exactly the tensors its configuration means, and that it fits the target (`loaded_by`).

    python -m eyrie_workers.drafters.check DIR [--target DIR] [--context N] [--fast]     findings as JSON; 0 or 65
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.drafters.checkpoint.card import Card, read_card
from eyrie_workers.drafters.eagle3.directory_format import CONFIG, ENGINES, WEIGHTS
from eyrie_workers.drafters.registry import FAMILIES
from eyrie_workers.drafters.validation import config as check_config
from eyrie_workers.drafters.validation.family_checks import Examined, Parts
from eyrie_workers.drafters.validation.finding import Finding, error, warning
from eyrie_workers.drafters.validation.target import read_target
from eyrie_workers.targets.loading import resolve

EXIT_DEFECTIVE = 65  # EX_DATAERR
_PICKLED = ("pytorch_model.bin", "model.pt", "model.ckpt")


def check_directory(directory: Path, *, target_dir: Path | None = None, context: int | None = None,
                    weights: bool = True, engines: Mapping[str, str] = ENGINES) -> tuple[Finding, ...]:
    """Findings about the drafter in `directory`; errors first. Raises TargetNotFound for a target that is none.

    context  tokens it shall be served with; None: whatever the two configs allow
    weights  also compare the target's weights with the card, which reads them all
    """
    target = read_target(target_dir) if target_dir is not None else None
    told = [warning("engine-version", f"these rules were read in {name} {ENGINES.get(name, '(none)')}, not {version}",
                    "try the drafter there before serving it; rules may have changed")
            for name, version in engines.items() if not version.startswith(ENGINES.get(name, "none"))]
    config, faults = _read_config(directory)
    if config is None:
        return (*faults, *told)
    examine = next((family.examine for family in FAMILIES.values()
                    if config.get("architectures") == [family.architecture]), None)
    if examine is None:
        return (*check_config.architecture_rules(config), *told)
    tensors, more = _read_tensors(directory)
    if tensors is None:
        return (*more, *told)
    card: Card | None = None
    try:
        card = read_card(directory)
    except EyrieError as fault:
        told.insert(0, error("card-unreadable", fault.message, fault.hint))
    found: Sequence[Finding] = tuple(check_config.mistaken_rules(config, tensors)) or examine(
        Examined(directory, Parts(config, tensors, card), target, context, weights))
    return tuple(sorted((*found, *told), key=lambda finding: finding.severity != "error"))


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
        print(json.dumps({"error": {"reason": fault.reason, "message": fault.message, "hint": fault.hint,
                                    "exit_code": fault.exit_code}}))
        return fault.exit_code
    print(json.dumps({"drafter": str(given.directory), "target": given.target, "context": given.context,
                      "engines": dict(engines), "findings": [finding.as_json() for finding in found]}, indent=2))
    return EXIT_DEFECTIVE if any(finding.severity == "error" for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())

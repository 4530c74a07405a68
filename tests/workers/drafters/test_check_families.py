"""The check of directories of every family in the registry: sound as exported; each defect has a hint."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.tuning import Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_workers.drafters.card import Card, identify
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments
from eyrie_workers.targets.config import parse_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from tests.tiny import tiny_mimo, tiny_target

SHAPE = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
FAMILY_NAMES = list(FAMILIES)


@dataclass(frozen=True)
class Made:
    """Two targets of each family's architecture, and where the families' drafters lie."""

    targets: dict[bool, tuple[Path, Path]]
    """By whether a family's drafter is a part of its target."""

    home: Path

    def target(self, family: str, number: int = 0) -> Path:
        return self.targets[FAMILIES[family].of_target][number]

    def copy(self, family: str, to: Path) -> Path:
        to.mkdir()
        for file in (self.home / family).iterdir():
            (to / file.name).write_bytes(file.read_bytes())
        return to


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("families")
    made = Made({False: (tiny_target(root / "target", seed=1), tiny_target(root / "other", seed=2)),
                 True: (tiny_mimo(root / "mimo", seed=1), tiny_mimo(root / "other-mimo", seed=2))}, root)
    for name in FAMILIES:
        family, target = family_named(name), made.target(name)
        config = parse_config(json.loads((target / "config.json").read_text()))
        ends = read_target_embeddings(target, False)
        spec = DrafterSpec.model_validate({"family": name, "max_draft_tokens": 3})
        layers = family.layers((1, 2, 3), config.num_layers)
        drafter = family.create(spec, config, ends, layers, DraftVocabulary(torch.arange(320), 320), 1)
        with torch.no_grad():  # heads begin as zeros, which the check takes for never trained
            for parameter in drafter.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        family.save(root / name, drafter, "float32", Card(
            family=name, target=identify(target), drafter=spec, aux_layers=layers, code_version="test"))
    return made


def codes(directory: Path, **more: Path) -> set[str]:
    found = check_directory(directory, **more)
    assert all(finding.hint for finding in found)
    return {finding.code for finding in found if finding.severity == "error"}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_an_export_of_any_family_has_no_errors_with_and_without_its_target(family: str, made: Made) -> None:
    assert codes(made.home / family) == set()
    assert codes(made.home / family, target_dir=made.target(family)) == set()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_another_target_is_reported_by_its_digest(family: str, made: Made) -> None:
    assert "target-differs" in codes(made.home / family, target_dir=made.target(family, 1))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_tensor_that_is_missing_is_named(family: str, made: Made, tmp_path: Path) -> None:
    directory = made.copy(family, tmp_path / "drafter")
    tensors = load_file(directory / "model.safetensors")
    gone = max(tensors, key=lambda name: tensors[name].numel())
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, directory / "model.safetensors")
    errors = [finding for finding in check_directory(directory) if finding.severity == "error"]
    assert any(gone in finding.what for finding in errors)


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if name != "eagle3"])  # whose card has no such rule
def test_a_card_of_another_family_is_an_error(family: str, made: Made, tmp_path: Path) -> None:
    directory = made.copy(family, tmp_path / "drafter")
    card = json.loads((directory / "eyrie-card.json").read_text()) | {"family": "eagle3"}
    (directory / "eyrie-card.json").write_text(json.dumps(card))
    assert "card-disagrees" in codes(directory)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_readme_names_the_family(family: str, made: Made) -> None:
    assert f"tags: [speculative-decoding, {family}]" in (made.home / family / "README.md").read_text()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_sglang_is_launched_with_the_familys_algorithm_or_the_launch_is_refused(family: str,
                                                                                made: Made) -> None:
    directory = made.home / family
    drafter = read_drafter(str(directory), json.loads((directory / "config.json").read_text()))
    target = made.target(family)
    plan = LaunchPlan(read_target(str(target), json.loads((target / "config.json").read_text())),
                      profile("h100"), "tiny", drafter=drafter, setting=Setting(tree=SHAPE))
    if drafter.algorithm is None:
        with pytest.raises(Unlaunchable, match="cannot serve") as refused:
            launch_arguments(plan)
        assert "the embedded engine" in refused.value.hint
    else:
        line = launch_arguments(plan)
        assert line[line.index("--speculative-algorithm") + 1] == drafter.algorithm

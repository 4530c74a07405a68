"""The table of families agrees with the implementations: names, states read, sizes."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import CausalHead, DrafterSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.sweep import expand
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from tests.tiny import tiny_target

NAMES = tuple(FAMILIES)
AUX_LAYERS = (1, 2, 3)
COMPARISON = Path(__file__).parents[3] / "docs/results/comparison.md"
VARIANTS = {"eagle3": ("EAGLE-3", "EAGLE-3 chain"), "eagle1": ("EAGLE-1", "EAGLE-2", "EAGLE-1 chain"),
            "medusa": ("Medusa", "Medusa best-first", "Medusa chain"), "hydra": ("Hydra", "Hydra chain"),
            "standalone": ("draft model",), "dflash": ("DFlash", "DDTree"), "dspark": (), "mtp": ()}
"""Of that page, by family; none of one that was not measured."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_every_row_names_an_implementation_of_its_name() -> None:
    assert all(family_named(name).name == name for name in NAMES)
    assert len({row.architecture for row in FAMILIES.values()}) == len(FAMILIES)


def test_the_speed_ups_a_plan_quotes_are_those_of_the_committed_comparison() -> None:
    table = COMPARISON.read_text().split("| variant | shape | speed-up, T = 0")[1].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    greedy = {row[0]: float(row[2].partition(" ")[0]) for row in cells}
    for name in NAMES:
        expected = max((greedy[variant] for variant in VARIANTS[name]), default=None)
        assert FAMILIES[name].quickstart_speedup == expected, name


def test_the_default_learning_rate_falls_with_the_width_of_the_target() -> None:
    eagle3 = family_named("eagle3")
    assert [eagle3.default_rate(width) for width in (64, 256, 512, 4096)] == [2e-3, 2e-3, 1e-3, 1.25e-4]
    assert family_named("dflash").default_rate(4096) == family_named("dflash").learning_rate


@pytest.mark.parametrize("name", NAMES)
def test_a_family_reads_the_states_of_its_row(name: str) -> None:
    fused = dict.fromkeys(("eagle3", "dflash", "dspark"), AUX_LAYERS)
    layers = (fused | {"standalone": ()}).get(name, (9,))
    assert family_named(name).layers(AUX_LAYERS, 9) == layers


@pytest.mark.parametrize(("name", "head"), [*((name, None) for name in NAMES),
                                            *(("dflash", head) for head in get_args(CausalHead))])
def test_a_plans_estimate_of_a_drafters_size_is_within_a_tenth(
        name: str, head: CausalHead | None, target_dir: Path) -> None:
    config = read_config(target_dir)
    embeddings = read_target_embeddings(target_dir, config.tie_word_embeddings)
    spec = DrafterSpec(family=name, draft_vocab_size=64, max_draft_tokens=3, causal_head=head)
    family = family_named(name)
    ids = torch.arange(config.vocab_size if family.row.whole_vocabulary else 64)
    made = family.create(spec, config, embeddings, family.layers(AUX_LAYERS, config.num_layers),
                         DraftVocabulary(ids, config.vocab_size), 0)
    size = sum(parameter.numel() for parameter in made.parameters())
    (candidate,) = expand(JobSpec(target=TargetSpec(model=str(target_dir)), drafter=spec,
                                  data=DataSpec(sources=(DataSource(path="quickstart"),))))
    assert target_facts(target_dir).trained_drafter(candidate).parameters == pytest.approx(size, rel=0.1)

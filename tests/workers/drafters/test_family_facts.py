"""The planner's table of families says what their programs do: which states they read, and how large they are."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from eyrie_api.decisions.families import FAMILIES, in_words
from eyrie_api.decisions.sweep import expand
from eyrie_api.submission.target_facts import target_facts
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.drafter import DrafterSpec, Family
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.comparison.forms import forms_of
from eyrie_workers.drafters import registry
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from tests.tiny import tiny_target

NAMES: tuple[Family, ...] = get_args(Family)
AUX_LAYERS = (1, 2, 3)
COMPARISON = Path(__file__).parents[3] / "docs/results/comparison.md"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_every_family_of_the_contract_is_in_both_tables_and_has_words() -> None:
    assert set(NAMES) == set(FAMILIES) == set(registry.FAMILIES)
    assert all(in_words(name).startswith(f"{name}: ") for name in NAMES)


def test_the_speed_ups_a_plan_quotes_are_those_of_the_committed_comparison() -> None:
    table = COMPARISON.read_text().split("| variant | shape | speed-up, T = 0")[1].partition("\n\n")[0]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    greedy = {row[0]: float(row[2].partition(" ")[0]) for row in cells}
    for name in NAMES:
        assert FAMILIES[name].seen == max(greedy[form.title] for form in forms_of(name)), name


@pytest.mark.parametrize("name", NAMES)
def test_a_family_reads_the_states_the_table_says(name: Family) -> None:
    family, facts = registry.FAMILIES[name], FAMILIES[name]
    assert family.layers(AUX_LAYERS, 9) == {"fused": AUX_LAYERS, "final": (9,), "none": ()}[facts.reads]
    assert family.whole_vocabulary == facts.whole_vocabulary


@pytest.mark.parametrize("name", NAMES)
def test_a_plans_estimate_of_a_drafters_size_is_within_a_tenth(name: Family, target_dir: Path) -> None:
    config = read_config(target_dir)
    ends = read_target_embeddings(target_dir, config.tie_word_embeddings)
    spec = DrafterSpec(family=name, draft_vocab_size=64, max_draft_tokens=3)
    family = registry.FAMILIES[name]
    ids = torch.arange(config.vocab_size if family.whole_vocabulary else 64)
    made = family.create(spec, config, ends, family.layers(AUX_LAYERS, config.num_layers),
                         DraftVocabulary(ids, config.vocab_size), 0)
    size = sum(parameter.numel() for parameter in made.parameters())
    (candidate,) = expand(JobSpec(target=TargetSpec(model=str(target_dir)), drafter=spec,
                                  data=DataSpec(sources=(DataSource(path="quickstart"),))))
    assert target_facts(target_dir).drafter_parameters(candidate) == pytest.approx(size, rel=0.1)

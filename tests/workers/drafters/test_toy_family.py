"""A family is one module and one row: `toy_family`, added to the table, is trained, served, planned and compared."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.sweep import SweepSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint, rank
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.resolve import derive
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.family import family_named, layers_of, open_drafter
from eyrie_workers.training.objective import StepContext
from tests.api.samples import benchmark_report
from tests.workers.drafters import heads, toy_family

FACTS = TargetFacts(hidden_size=64, num_layers=4, vocab_size=320, intermediate_size=128, num_heads=4, num_kv_heads=2,
                    head_dim=16, tie_word_embeddings=False, source="test")
TREE = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=12)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", toy_family.ROW)


def job(*families: str) -> JobSpec:
    return JobSpec(target=TargetSpec(model="quickstart"), data=DataSpec(sources=(DataSource(path="quickstart"),)),
                   drafter=DrafterSpec(family="toy"), sweep=SweepSpec(families=families))


def test_the_toy_is_trained_exported_validated_and_decodes_losslessly(tmp_path: Path) -> None:
    world = heads.world(tmp_path / "target", num_documents=4)
    family = family_named("toy")
    assert layers_of(["toy"], (1, 2, 3), 4) == (4,)
    drafter = heads.new_drafter(family, world)
    objective = heads.objective(family, drafter, world)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=family.learning_rate)
    accuracy_before = objective(world.packed).hits[0].double().mean()
    for step in range(40):
        optimizer.zero_grad()
        objective(world.packed, StepContext(step, 40, seed=0)).loss.backward()
        optimizer.step()
    assert objective(world.packed).hits[0].double().mean() > accuracy_before + 0.3
    family.save(tmp_path / "drafter", drafter, "float32", None)
    assert [finding for finding in check_directory(tmp_path / "drafter") if finding.severity == "error"] == []
    opened = open_drafter(tmp_path / "drafter", world.target)
    for sampling in heads.SAMPLINGS.values():
        plain = heads.answers(world, None, None, sampling)
        for shape in (heads.SHAPES["chain"], heads.SHAPES["dynamic"]):
            drafted = heads.answers(world, opened, shape, sampling)
            assert [generation.token_ids for generation in drafted] == [generation.token_ids for generation in plain]


def test_the_toy_is_in_the_plan_with_its_size_and_description() -> None:
    spec = job("toy", "eagle3")
    resolved = derive(spec)
    plan = make_plan(resolved, FACTS, None)
    assert FACTS.trained_drafter(resolved.candidates[0]).parameters == 64 * 64 + 320 * 64
    assert any(note.startswith("toy: for tests; drafting takes one product per round") for note in plan.notes)


def test_the_toy_is_on_the_leaderboard_and_in_the_comparison() -> None:
    report = benchmark_report("toy-step-1", {"chat": (2.0,)})
    (entry,) = rank([MeasuredCheckpoint(job_id="j", family="toy", target="t", tuned=False, report=report)])
    assert entry.family == "toy"


def test_a_family_without_a_row_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValidationError, match=r"'eagle9' is not a drafter family: use one of eagle3, .*, dspark, toy"):
        DrafterSpec(family="eagle9")


def test_a_row_whose_module_implements_another_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_family, "FAMILY", family_named("medusa"))
    with pytest.raises(AssertionError, match="'medusa', its row in FAMILIES is 'toy'"):
        family_named("toy")

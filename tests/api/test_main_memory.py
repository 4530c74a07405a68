"""A stage that the machine's memory cannot hold: named with its need, what there is, and the field that changes it."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.errors import MemoryTooSmall
from eyrie_api.planning.facts import memory_here
from eyrie_api.planning.main_memory import StageMemory, stage_memory, too_small_memory
from eyrie_api.planning.plan_work import DataFacts, PlannedWork
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory
from tests.api.test_plan import SMALL

GIB = 2**30
ON_CPUS = dict.fromkeys(("regenerate", "capture", "train", "benchmark", "tune", "prove"), 0)
SAMPLED = DataFacts(rows=5000, prompt_tokens=100.0)
WEIGHTS = 4 * SMALL.parameters


def work_of(data: DataFacts = SAMPLED, **changes: Any) -> PlannedWork:
    return PlannedWork(derive(job_spec(**({"target": {"model": "quickstart", "dtype": "float32"}} | changes))), SMALL,
                       data)


def needs(work: PlannedWork) -> dict[str, StageMemory]:
    return {needed.stage: needed for needed in stage_memory(work) if needed.stage in work.stages}


def test_regeneration_takes_weights_and_keys_and_values_of_the_answers_that_are_generated_at_once() -> None:
    # 16 layers, 2 heads of 64 keys and as many values, in float64 next to a float32 target.
    token = 2 * 16 * 2 * 64 * 8
    work = work_of(regenerate={"concurrency": 30, "max_new_tokens": 400})
    assert needs(work)["regenerate"].need == WEIGHTS + 10**9 + 30 * (100 + 400) * token
    [error] = too_small_memory(work, ON_CPUS, WEIGHTS + 10**9 + 21 * 500 * token + 1)
    assert error.message.startswith("regenerate needs at least 1.4 GiB of memory, of which 468.8 MiB follow from "
                                    "regenerate.concurrency 30 and ")
    assert error.message.endswith("this machine has 1.3 GiB")
    assert error.hint == "lower regenerate.concurrency to at most 21"
    assert too_small_memory(work, ON_CPUS, needs(work)["regenerate"].need) == []


def test_the_lengths_of_data_that_was_not_sampled_refuse_nothing() -> None:
    assert needs(work_of(DataFacts()))["regenerate"].need < WEIGHTS + 10**9 + 10**6


def test_capture_takes_a_pass_with_the_states_that_it_returns() -> None:
    work = work_of(capture={"batch_tokens": 8192})
    # Three aux states and the final one; the residual stream twice and its normed values; gate, up and their product.
    assert needs(work)["capture"].need == WEIGHTS + 10**9 + 8192 * 4 * (4 * 256 + 3 * 256 + 3 * 704)


def test_training_grows_with_the_tokens_of_a_step_and_with_the_drafters_that_one_program_trains() -> None:
    small, large = (needs(work_of(train={"max_tokens_per_batch": tokens}))["train"] for tokens in (1024, 65_536))
    # A root has its row of the teacher's table: 2048 draft tokens in float32. About four of five tokens are answers.
    assert large.need - small.need > 0.8 * (65_536 - 1024) * 2048 * 4
    assert large.fixed == small.fixed
    drafter = work_of().drafter(work_of().job.candidates[0])
    two = work_of(sweep={"axes": [{"field": "train.learning_rate", "values": [1e-3, 2e-3]}], "shared_passes": "always"})
    assert needs(two)["train"].need == needs(work_of())["train"].need + 16 * drafter.parameters


def test_a_family_whose_step_is_not_described_counts_with_its_weights_gradients_and_moments() -> None:
    work = work_of(drafter={"family": "medusa"})
    drafter = work.drafter(work.job.candidates[0])
    assert needs(work)["train"].fixed == 10**9 + 16 * drafter.parameters + 2 * 4 * 2048 * 256


def test_what_computes_on_gpus_is_no_matter_of_main_memory() -> None:
    assert too_small_memory(work_of(), ON_CPUS | {"prove": 1}, 2**20)[-1].message.startswith("tune needs")
    assert too_small_memory(work_of(), dict.fromkeys(ON_CPUS, 1), 0) == []


def test_a_job_that_exceeds_this_machine_is_refused_and_its_plan_says_so(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    target = target_directory(tmp_path / "target", head_dim=65_536)  # a token's keys and values are 8 MiB
    spec = job_spec(target={"model": str(target)}, regenerate={"concurrency": 4096})
    with pytest.raises(MemoryTooSmall, match=r"regenerate needs at least \d\.\d TiB .* this machine has") as refused:
        check(spec, settings)
    assert refused.value.hint.startswith("lower regenerate.concurrency to at most ")
    assert any(refused.value.message in warning for warning in plan(spec, settings).warnings)


@pytest.mark.parametrize(("groups", "files", "gib"), [
    ("", {}, 8),
    ("0::/pod/stage\n", {"pod/memory.max": str(2 * GIB), "pod/stage/memory.max": "max"}, 2),
    ("0::/pod\n", {"pod/memory.max": str(64 * GIB)}, 8),
    ("4:memory:/pod\n0::/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096),
                               "memory/pod/memory.limit_in_bytes": str(3 * GIB)}, 3),
    # A container sees its own group as the root, and may be given its path outside.
    ("0::/docker/abc\n", {"memory.max": str(GIB)}, 1)])
def test_the_limit_of_a_control_group_counts(groups: str, files: dict[str, str], gib: int, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert memory_here(tmp_path / "proc", tmp_path / "groups") == gib * GIB


def test_a_machine_that_does_not_say_how_much_it_has_refuses_nothing(tmp_path: Path) -> None:
    assert memory_here(tmp_path, tmp_path) is None

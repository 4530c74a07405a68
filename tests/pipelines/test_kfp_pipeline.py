"""The compiled pipeline: what is checked in is what the source says, and kfp.local's traps are not in it.

`python -m tests.pipelines.test_kfp_pipeline` writes what is checked in, the pipeline without placements.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from eyrie_api.contract.stages import JOB_STAGES
from eyrie_pipelines.kfp_pipeline import define

CHECKED_IN = Path(__file__).resolve().parents[2] / "pipelines" / "compiled" / "drafter.yaml"


def load(path: Path) -> dict[str, Any]:
    """The pipeline's definition, without the SDK's version, which is no part of what we mean."""
    text = re.sub(r"sdkVersion: .*", "", path.read_text())
    loaded: dict[str, Any] = next(iter(yaml.safe_load_all(text)))
    return loaded


def tasks_of(definition: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = dict(definition["root"]["dag"]["tasks"])
    for component in definition["components"].values():
        found |= component.get("dag", {}).get("tasks", {})
    return found


def test_the_compiled_pipeline_equals_what_is_checked_in(tmp_path: Path) -> None:
    compiler.Compiler().compile(define(), str(tmp_path / "drafter.yaml"))
    assert load(tmp_path / "drafter.yaml") == load(CHECKED_IN), "run: python -m tests.pipelines.test_kfp_pipeline"


def test_every_stage_of_a_job_is_a_box() -> None:
    assert set(JOB_STAGES) <= set(tasks_of(load(CHECKED_IN)))


def test_only_strings_cross_a_box_border() -> None:
    """kfp.local turns integers in collected lists into floats; numbers travel in files instead."""
    for component in load(CHECKED_IN)["components"].values():
        for side in ("inputDefinitions", "outputDefinitions"):
            for parameter in component.get(side, {}).get("parameters", {}).values():
                assert parameter["parameterType"] in ("STRING", "LIST")


def test_nothing_is_conditional_nothing_is_cached_and_no_workspace_is_used() -> None:
    """kfp.local evaluates conditions as text and skips in silence, caches blind to code, and deletes workspaces."""
    definition = load(CHECKED_IN)
    for name, task in tasks_of(definition).items():
        assert "condition" not in task.get("triggerPolicy", {}), name
        assert not task.get("cachingOptions", {}).get("enableCache", False), name
        if not name.startswith("for-loop"):
            assert "cachingOptions" in task, name
    assert "workspace" not in CHECKED_IN.read_text()


def test_every_fan_out_runs_one_at_a_time() -> None:
    loops = [task for task in tasks_of(load(CHECKED_IN)).values() if "parameterIterator" in task]
    assert len(loops) == 2
    assert {task["iteratorPolicy"]["parallelismLimit"] for task in loops} == {1}


def test_nothing_is_installed_when_a_box_starts() -> None:
    for executor in load(CHECKED_IN)["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"])


if __name__ == "__main__":
    compiler.Compiler().compile(define(), str(CHECKED_IN))

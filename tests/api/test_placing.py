"""What a job may ask of a cluster, over what its administrator gives."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.placement import JobPlacement, Placement, PlacementRequest, StageKey
from eyrie_api.contract.stages import JOB_STAGES
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.checks import shards_fit_the_pod
from eyrie_api.planning.facts import Facts
from eyrie_api.planning.placement import merge_placement, read_profile, resolve_stage_placement
from eyrie_api.planning.preflight import check
from eyrie_api.planning.resolve import resolve
from eyrie_api.planning.submission import Submission
from eyrie_api.settings import Settings
from tests.api.samples import job_spec

WORK = {"kind": "s3", "url": "s3://bucket/eyrie"}


def profile(**changes: Any) -> ClusterProfile:
    document = {"kubeflow": {"url": "http://ml-pipeline:8888"}, "stages": {"image": "eyrie/workers", "work": WORK}}
    return ClusterProfile.model_validate_json(json.dumps({**document, **changes}))


def test_a_job_may_name_every_stage_there_is() -> None:
    assert set(get_args(StageKey)) == set(JOB_STAGES)


def test_a_request_changes_what_it_names_and_leaves_the_rest() -> None:
    given = Placement.model_validate({"image": "a", "num_gpus": 1, "requests": {"cpu": "2", "memory": "4Gi"},
                                      "tolerations": [{"key": "gpu"}], "queue": "small"})
    wanted = PlacementRequest.model_validate({"num_gpus": 8, "requests": {"cpu": "16"},
                                              "tolerations": [{"key": "gpu"}, {"key": "spot"}]})
    placed = merge_placement(given, wanted)
    assert (placed.num_gpus, placed.queue, placed.image) == (8, "small", "a")
    assert placed.requests == {"cpu": "16", "memory": "4Gi"}
    assert [one.key for one in placed.tolerations] == ["gpu", "spot"]
    assert merge_placement(given, PlacementRequest()) == given


def test_a_stage_gets_the_jobs_wish_over_every_stages_over_the_administrators() -> None:
    whole = profile(per_stage={"train": {"image": "eyrie/train", "num_gpus": 2}})
    wanted = JobPlacement.model_validate({"every": {"queue": "team"}, "stages": {"train": {"num_gpus": 4}}})
    train, tune = resolve_stage_placement(whole, wanted, "train"), resolve_stage_placement(whole, wanted, "tune")
    assert (train.image, train.num_gpus, train.queue) == ("eyrie/train", 4, "team")
    assert (tune.image, tune.num_gpus, tune.queue) == ("eyrie/workers", 0, "team")
    assert train.work == tune.work == whole.stages.work


def test_a_request_that_contradicts_the_administrator_is_refused_in_words() -> None:
    given = Placement.model_validate({"image": "a", "gpu_type": "H100"})
    with pytest.raises(InvalidInput, match="gpu_type"):
        merge_placement(given, PlacementRequest(node_selector={"nvidia.com/gpu.product": "A100"}))


@pytest.mark.parametrize(("field", "value"), [("image", "evil"), ("host_paths", []), ("service_account", "admin"),
                                              ("secret_variables", []), ("work", WORK)])
def test_a_job_cannot_ask_for_what_reaches_other_peoples_data(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        PlacementRequest.model_validate({field: value})


def test_several_nodes_without_a_trainjob_are_refused() -> None:
    with pytest.raises(ValidationError, match="train_launcher"):
        JobPlacement(train_nodes=2)


def test_a_profile_is_read_and_a_wrong_one_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(profile().model_dump(mode="json", exclude_none=True)))
    assert read_profile(path) == profile()
    path.write_text("kubeflow: {url: nowhere}\nstages: {image: a}\n")
    with pytest.raises(InvalidInput, match=r"kubeflow\.url"):
        read_profile(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_profile(tmp_path / "absent.yaml")


def test_a_profile_without_a_shared_work_area_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"stages\.work is missing"):
        profile(stages={"image": "a"})


@pytest.mark.parametrize(("work", "capture", "gpus", "refused"), [
    ({"states": "ranged", "scratch_size": "4Gi"}, {}, 8, False),
    ({"states": "ranged", "scratch_size": "4G"}, {}, 8, True),
    ({"states": "ranged", "scratch_size": "0.5Gi"}, {}, 0, False),
    ({"states": "ranged", "scratch_size": "511Mi"}, {}, 0, True),
    ({"states": "ranged", "scratch_size": "511Mi"}, {"mode": "stream"}, 0, False),
    ({"states": "copied", "scratch_size": "511Mi"}, {}, 0, False), ({"states": "ranged"}, {}, 8, False),
])
def test_two_shards_of_each_process_of_capture_fit_into_the_work_area_of_its_pod(
        work: dict[str, str], capture: dict[str, str], gpus: int, refused: bool) -> None:
    placed = profile(stages={"image": "eyrie/workers", "work": WORK | work})
    spec = job_spec(capture=capture, placement={"stages": {"capture": {"num_gpus": gpus}}} if gpus else {})
    submission = Submission(resolve(spec, Facts(placed)), Facts(placed), Settings())
    if not refused:
        shards_fit_the_pod(submission)
        return
    with pytest.raises(InvalidInput, match=r"capture\.shard_size_bytes = 268435456: two shards of each of") as caught:
        shards_fit_the_pod(submission)
    assert "give at most" in caught.value.hint


def test_a_job_whose_shards_do_not_fit_is_refused_at_submission(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    work = WORK | {"states": "ranged", "scratch_size": "100Mi"}
    file.write_text(profile(stages={"image": "eyrie/workers", "work": work}).model_dump_json())
    with pytest.raises(InvalidInput, match="the work area of a pod has 100Mi"):
        check(job_spec(), Settings(home=tmp_path, cluster_profile=file))

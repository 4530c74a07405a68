"""What a job counts for its project's quotas of GPUs and replicas."""

from typing import Any

import pytest

from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.planning.facts import Facts
from eyrie_api.planning.resolve import replicas_of, resolve
from tests.api.samples import job_spec
from tests.api.test_placing import profile

ON_GPUS = {"every": {"num_gpus": 1}}
FOUR = {"axes": [{"field": "train.learning_rate", "values": [0.001, 0.0005, 0.0002, 0.0001]}]}
SERVING = {"namespace": "serving", "placement": {"image": "sglang"}, "replicas": 2}


def gpus_of(spec: JobSpec, given: ClusterProfile | None) -> int:
    return resolve(spec, Facts(given)).demand.num_gpus


@pytest.mark.parametrize(("changes", "num_gpus"), [
    ({}, 0),
    ({"placement": ON_GPUS, "train": {"num_checkpoints": 1}}, 1),
    ({"placement": ON_GPUS, "train": {"num_checkpoints": 3}}, 3),  # benchmarks of all checkpoints
    ({"placement": ON_GPUS, "train": {"num_checkpoints": 1}, "rivals": [{"method": "off"}]}, 1),  # no weights
    ({"placement": {"stages": {"capture": {"num_gpus": 8}}}}, 8),
    ({"placement": {"stages": {"train": {"num_gpus": 8}}, "train_nodes": 2, "train_launcher": "trainjob"}}, 16),
    ({"placement": {"stages": {"train": {"num_gpus": 1}}}, "sweep": FOUR}, 1),  # one program trains all
    ({"placement": {"stages": {"train": {"num_gpus": 1}}}, "sweep": FOUR | {"shared_passes": "never"}}, 4),
    ({"placement": {"stages": {"train": {"num_gpus": 2}}}, "sweep": FOUR}, 8),
])
def test_a_job_counts_the_gpus_of_the_stage_that_requests_the_most_at_one_time(
        changes: dict[str, Any], num_gpus: int) -> None:
    assert gpus_of(job_spec(**changes), profile()) == num_gpus


def test_gpus_that_the_administrators_profile_adds_count_too_unless_the_job_declines_them() -> None:
    given = profile(per_stage={"train": {"image": "eyrie/train", "num_gpus": 8}})
    assert gpus_of(job_spec(), given) == 8
    assert gpus_of(job_spec(placement={"every": {"num_gpus": 0}}), given) == 0


def test_on_one_machine_the_gpus_named_for_the_training_count() -> None:
    assert gpus_of(job_spec(sweep=FOUR), None) == 0
    placement = {"every": {"num_gpus": 2}, "stages": {"capture": {"num_gpus": 8}}}
    assert gpus_of(job_spec(placement=placement, sweep=FOUR), None) == 2
    assert gpus_of(job_spec(placement=placement | {"stages": {"train": {"num_gpus": 1}}}), None) == 1


def test_an_endpoint_counts_the_replicas_it_names_or_gets_or_may_be_scaled_to() -> None:
    assert replicas_of(ServeSpec(replicas=3), None) == 1
    assert replicas_of(ServeSpec(replicas=3), profile(serving=SERVING)) == 3
    assert replicas_of(ServeSpec(), profile(serving=SERVING)) == 2
    scaled = profile(serving=SERVING | {"autoscale": {"prometheus_url": "http://prometheus", "max_replicas": 6}})
    assert replicas_of(ServeSpec(), scaled) == 6

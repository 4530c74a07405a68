"""`prove.hardware` of a job: what is refused, what a plan says of it, and its report and figure."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.hardware import HardwareMeasurement, HardwareSpec, PlacedProfile
from eyrie_api.contract.placement import Placement, VolumeWork
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.status import JobReport
from eyrie_api.decisions.hardware_choice import hardware_of, sentence
from eyrie_api.errors import InvalidInput
from eyrie_api.figures.job_figures import figures_of
from eyrie_api.planning.facts import Facts
from eyrie_api.planning.preflight import plan
from eyrie_api.planning.resolve import resolve
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory
from tests.api.test_hardware_choice import load_report

PROFILE = ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:8888"),
                         stages=Placement(image="eyrie/workers:1", num_gpus=1, work=VolumeWork(claim="work")))


def compared(*profiles: dict[str, Any], **fields: Any) -> dict[str, Any]:
    priced = [{"price_per_hour": 1.0} | one for one in profiles]
    return {"prove": {"hardware": {"profiles": priced} | fields}}


def planned(tmp_path: Path, spec: dict[str, Any], **settings: Any) -> Plan:
    target = target_directory(tmp_path / "target")
    return plan(job_spec(target={"model": str(target), "dtype": "float32"}, **spec),
                Settings(home=tmp_path / "home", **settings))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_dump_json())
    return path


@pytest.mark.parametrize(("profile", "words"), [
    ({"placement": {"gpu_type": "NVIDIA-B200"}}, r"profiles\.1\.placement\.gpu_type is set.*one machine"),
    ({"placement": {"num_gpus": 64}}, r"profiles\.1\.placement\.num_gpus is 64 and this machine has"),
    ({"threads": 1000}, r"profiles\.1\.threads is 1000 and this machine has"),
])
def test_what_this_machine_does_not_have_is_refused(tmp_path: Path, profile: dict[str, Any], words: str) -> None:
    spec = compared({"name": "here", "threads": 1}, {"name": "there"} | profile)
    with pytest.raises(InvalidInput, match=words):
        planned(tmp_path, spec)


def test_on_a_cluster_a_type_of_gpu_that_nobody_knows_is_refused_and_an_administrator_can_name_it(
        tmp_path: Path, cluster: Path) -> None:
    spec = compared({"name": "mi300x", "placement": {"num_gpus": 1, "gpu_type": "AMD-MI300X"}})
    with pytest.raises(InvalidInput, match="gpu_type 'AMD-MI300X' is not a known type") as refused:
        planned(tmp_path, spec, cluster_profile=cluster)
    assert "EYRIE_GPU_HOUR_PRICES" in refused.value.hint
    planned(tmp_path, spec, cluster_profile=cluster, gpu_hour_prices="AMD-MI300X=4")
    planned(tmp_path, compared({"name": "b200", "placement": {"num_gpus": 1, "gpu_type": "NVIDIA-B200"}}),
            cluster_profile=cluster)


def test_contradictions_of_a_document_name_the_field() -> None:
    with pytest.raises(ValidationError, match="two profiles are named 'a'"):
        HardwareSpec(profiles=(PlacedProfile(name="a", price_per_hour=1.0),) * 2)
    with pytest.raises(ValidationError, match=r"prove\.hardware\.profiles\.0\.threads is 2 and engine is 'sglang'"):
        job_spec(engine={"kind": "sglang"}, **compared({"name": "a", "threads": 2}))


def test_a_plan_has_a_row_for_each_profile_with_its_own_price_and_range(tmp_path: Path, cluster: Path) -> None:
    spec = compared({"name": "h200-x2", "price_per_hour": 7.0, "placement": {"num_gpus": 2, "gpu_type": "NVIDIA-H200"}},
                    {"name": "b200", "price_per_hour": 5.0, "placement": {"num_gpus": 1, "gpu_type": "NVIDIA-B200"}})
    rows = [one for one in planned(tmp_path, spec, cluster_profile=cluster).stages if one.stage == "hardware"]
    assert [(one.key, one.num_gpus, one.gpu_type) for one in rows] == [("h200-x2", 2, "H200"), ("b200", 1, "B200")]
    for one, price in zip(rows, (7.0, 5.0), strict=True):
        assert one.cost == pytest.approx(one.hours * price)
        assert one.hours_range is not None
        assert one.hours_range.low < one.hours < one.hours_range.high
    here = planned(tmp_path, compared({"name": "here", "threads": 1}, concurrencies=[1, 2]))
    [row] = [one for one in here.stages if one.stage == "hardware"]
    assert (row.num_gpus, row.cost, row.tokens) == (0, None, 3 * 64 * 2 * 24)
    assert not [one for one in planned(tmp_path, {}).stages if one.stage == "hardware"]


def test_profiles_but_the_first_count_together_for_a_quota() -> None:
    profiles = [{"name": name, "placement": {"num_gpus": number}} for name, number in (("a", 4), ("b", 2), ("c", 3))]
    assert resolve(job_spec(**compared(*profiles)), Facts(PROFILE)).demand.num_gpus == 5
    assert resolve(job_spec(**compared(*profiles[:2])), Facts(PROFILE)).demand.num_gpus == 4


def measurements() -> list[HardwareMeasurement]:
    """Of two profiles, each with its part of one load test."""
    whole = load_report()
    found = []
    for name, price, gpus in (("h200-x2", 7.0, ("0", "1")), ("b200", 5.0, ("0",))):
        part = whole.model_copy(update={
            "variants": {f"{name}/off": "-", f"{name}/drafted": "-"},
            "levels": tuple(one for one in whole.levels if one.variant.startswith(name)),
            "comparisons": tuple(one for one in whole.comparisons if one.variant.startswith(name))})
        found.append(HardwareMeasurement(
            profile=PlacedProfile(name=name, price_per_hour=price).served_on(gpus), load=part))
    return found


def test_the_report_of_a_job_has_the_profiles_in_its_order_and_says_how_sure_the_recommendation_is() -> None:
    spec = HardwareSpec(profiles=(PlacedProfile(name="b200", price_per_hour=5.0),
                                  PlacedProfile(name="h200-x2", price_per_hour=7.0),
                                  PlacedProfile(name="not-yet", price_per_hour=1.0)))
    first, second = measurements()
    report = hardware_of(spec, [first, second])
    assert report is not None
    assert [one.name for one in report.profiles] == ["b200", "h200-x2"]
    assert len(report.rows) == 4
    assert sentence(report.choices[0], report) == (
        "8 users at once: b200, drafted, is the cheapest per token, 0.50x the money of b200/off (0.48 to 0.53)")
    assert hardware_of(spec, [first]) is None  # of the first profile's off nothing is known


def test_the_figure_has_a_line_for_each_profile_and_variant_and_the_money_of_every_point() -> None:
    spec = HardwareSpec(profiles=(PlacedProfile(name="b200", price_per_hour=5.0),
                                  PlacedProfile(name="h200-x2", price_per_hour=7.0)))
    report = JobReport(job_id="j", name=None, target="t", phase="Succeeded", seconds={},
                       hardware=hardware_of(spec, measurements()))
    [figure] = figures_of(report)
    assert (figure.name, figure.rows) == ("hardware", 4)
    assert figure.title.startswith("b200, drafted, has the cheapest tokens: 0.694 a million with 8 users")
    data = figure.spec["data"]
    assert isinstance(data, dict)
    assert {row["variant"] for row in data["values"]} == {  # type: ignore[union-attr, index, call-overload]
        "b200/off", "b200/drafted", "h200-x2/off", "h200-x2/drafted"}



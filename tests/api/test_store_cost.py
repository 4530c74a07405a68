"""What a plan says of the object store: objects, requests, bytes and money."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plans import OLMO_32B
from eyrie_api.artifacts.store_prices import StorePrices, store_prices
from eyrie_api.cli.tables import plan_view
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.contract.plan import Plan
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_stages import ObjectStore
from eyrie_api.planning.plan_work import DataFacts
from eyrie_api.planning.preflight import plan
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory

MIB = 2**20
PRICES = StorePrices("mine", storage=20.0, put=5.0, get=0.5, source="here")
STORE = ObjectStore(PRICES, ranged=True, part_bytes=16 * MIB)


def of_olmo(store: ObjectStore | None = STORE, **changes: object) -> Plan:
    """The plan of 500,000 rows of 2048 tokens on GPUs."""
    spec = job_spec(**{"target": {"model": "olmo", "dtype": "bfloat16"},
                       "data": {"sources": [{"path": "quickstart"}], "max_conversations": 500_000,
                                "held_out_fraction": 0.0, "max_prompt_tokens": 1024},
                       "placement": {"every": {"num_gpus": 1, "gpu_type": "NVIDIA-H200"}}} | changes)
    return make_plan(derive(spec), OLMO_32B, None, data_facts=DataFacts(500_000, 1024.0, 1024.0, "given"),
                     store=store)


def test_states_are_written_in_shards_of_parts_and_read_by_rows_in_every_epoch() -> None:
    planned = {one.stage: one for one in of_olmo(train={"epochs": 2.0}).stages}
    states = planned["capture"].bytes_on_disk
    capture, train = planned["capture"].store, planned["train"].store
    assert capture is not None
    assert train is not None
    shards = -(-states // (256 * MIB))
    assert capture.objects == shards + 4
    assert capture.put_requests == pytest.approx(shards * 18, rel=0.01)  # 16 parts, the beginning and the end
    assert train.read_bytes == pytest.approx(2 * states, rel=0.01)
    per_row = -(-states // 500_000 // (16 * MIB))
    assert train.get_requests == pytest.approx(2 * 500_000 * per_row, rel=0.05)


def test_money_is_that_of_requests_and_of_the_time_that_bytes_stay() -> None:
    plan = of_olmo()
    planned = {one.stage: one for one in plan.stages}
    tune, capture = planned["tune"], planned["capture"]
    assert tune.store is not None
    assert capture.store is not None
    assert tune.store.cost is not None
    held = sum(planned[name].bytes_on_disk for name in ("regenerate", "capture", "train", "benchmark"))
    requests = (tune.store.put_requests * 5.0 + tune.store.get_requests * 0.5) / 1e6
    assert tune.store.cost == pytest.approx(held / 1e12 * 20.0 * tune.hours / 730 + requests)
    assert capture.store.cost_range is not None
    assert capture.store.cost is not None
    assert capture.store.cost_range.low < capture.store.cost < capture.store.cost_range.high
    assert plan.total_store_cost == pytest.approx(sum(
        one.store.cost for one in plan.stages if one.store is not None and one.store.cost is not None))
    assert plan.store_month_cost == pytest.approx(plan.total_bytes_on_disk / 1e12 * 20.0)
    dear = of_olmo(replace(STORE, prices=replace(PRICES, traffic=90.0)))
    assert dear.total_store_cost is not None
    assert plan.total_store_cost is not None
    read = sum(one.store.read_bytes for one in plan.stages if one.store is not None)
    assert dear.total_store_cost - plan.total_store_cost == pytest.approx(read / 1e12 * 90.0)


def test_copied_states_are_read_once_by_each_training_that_is_a_pod_of_its_own() -> None:
    sweep = {"axes": [{"field": "train.learning_rate", "values": [1e-4, 2e-4, 3e-4]}]}
    read = []
    for together in ("always", "never"):
        train = of_olmo(replace(STORE, ranged=False), sweep=sweep | {"shared_passes": together}).stages[2]
        assert train.store is not None
        read.append(train.store.read_bytes)
    assert read[1] == 3 * read[0]


def test_answers_that_stay_in_the_store_are_read_to_order_them_and_again_by_capture() -> None:
    read = {}
    for ranged in (True, False):
        regenerate, capture = of_olmo(replace(STORE, ranged=ranged)).stages[:2]
        assert regenerate.store is not None
        assert capture.store is not None
        read[ranged] = [one.read_bytes / regenerate.bytes_on_disk for one in (regenerate.store, capture.store)]
    assert read == {True: [pytest.approx(2.0), pytest.approx(2.0)], False: [0.0, pytest.approx(1.0)]}


def test_without_prices_requests_are_counted_and_money_is_not_and_without_a_store_nothing_is() -> None:
    unknown = of_olmo(replace(STORE, prices=None))
    assert unknown.stages[1].store is not None
    assert (unknown.stages[1].store.cost, unknown.total_store_cost, unknown.store_month_cost) == (None, None, None)
    alone = of_olmo(None)
    assert not [one for one in alone.stages if one.store is not None]
    assert (alone.total_store_cost, alone.store_month_cost) == (None, None)


@pytest.mark.parametrize(("text", "endpoint", "name", "storage", "traffic"), [
    (None, None, "aws-s3", 21.4, 0.0), (None, "https://s3.eu-west-1.amazonaws.com", "aws-s3", 21.4, 0.0),
    (None, "https://account.r2.cloudflarestorage.com", "r2", 15.0, 0.0), ("gcs", "http://minio:9000", "gcs", 18.6, 0.0),
    ("aws-s3,traffic=90", None, "aws-s3", 21.4, 90.0), ("storage=7,put=0,get=0", "http://minio:9000",
                                                         "of EYRIE_STORE_PRICES", 7.0, 0.0)])
def test_prices_are_those_of_the_address_of_a_name_or_given(text: str | None, endpoint: str | None, name: str,
                                                            storage: float, traffic: float) -> None:
    found = store_prices(text, endpoint)
    assert found is not None
    assert (found.name, found.traffic) == (name, traffic)
    assert found.storage == pytest.approx(storage, abs=0.05)


def test_an_unknown_address_has_no_prices_and_what_is_not_a_price_is_refused(tmp_path: Path) -> None:
    assert store_prices(None, "http://minio:9000") is None
    with pytest.raises(InvalidInput, match=r"EYRIE_STORE_PRICES.*neither a known store"):
        Settings.from_env({"EYRIE_STORE_PRICES": "azure"})
    profile = tmp_path / "profile.json"
    profile.write_text(ClusterProfile(kubeflow=KubeflowSpec(url="http://kfp:1"), stages=Placement(
        image="a/b:1", work=S3Work(url="s3://b/p", endpoint_url="http://minio:9000"))).model_dump_json())
    target = {"target": {"model": str(target_directory(tmp_path / "target")), "dtype": "float32"}}
    settings = Settings(home=tmp_path, cluster_profile=profile, store_prices="storage=7")
    with pytest.raises(InvalidInput, match="put, get is missing, and no known store is named"):
        plan(job_spec(**target), settings)
    priced = plan(job_spec(**target), settings.model_copy(update={"store_prices": "r2,storage=7"}))
    assert priced.total_store_cost is not None
    assert any(one.name == "r2: storage" and one.value == 7.0 for one in priced.assumptions)
    assert plan_view(priced)

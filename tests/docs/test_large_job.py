"""Job, profile and values of docs/large_job.md are valid, and the job is planned before there is a cluster."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from eyrie_api import yaml_text
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import S3Work
from eyrie_api.planning.preflight import plan
from eyrie_api.planning.sglang_attention import PROFILES
from eyrie_api.settings import Settings
from tests.house.sources import ROOT

PAGE = (ROOT / "docs/large_job.md").read_text()
JOB, PROFILE, VALUES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)

QWEN3_32B = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 5120,
             "num_hidden_layers": 64, "vocab_size": 151_936, "intermediate_size": 25_600, "num_attention_heads": 64,
             "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
             "max_position_embeddings": 40_960, "rope_theta": 1e6, "torch_dtype": "bfloat16"}


def test_a_32b_job_is_planned_from_its_config_on_a_machine_without_gpus_or_a_cluster(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec.model_validate(yaml_text.load(JOB))
    cached = tmp_path / "hub" / ("models--" + spec.target.model.replace("/", "--"))
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c0ffee")
    (cached / "snapshots/c0ffee").mkdir(parents=True)
    (cached / "snapshots/c0ffee/config.json").write_text(json.dumps(QWEN3_32B))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "profile.yaml").write_text(PROFILE)
    planned = plan(spec, Settings(home=tmp_path / "home", cluster_profile=tmp_path / "profile.yaml"))
    assert {"regenerate", "capture", "train", "benchmark", "tune", "prove"} == {one.stage for one in planned.stages}
    assert all((one.num_gpus, one.gpu_type) == (8, "H100") for one in planned.stages)
    assert planned.store_month_cost is not None, "the store is read by ranges, and its cost is known"
    weights = next(one for one in planned.assumptions if one.name == "target weights")
    usable = PROFILES["h100"].memory_gib * PROFILES["h100"].mem_fraction * 2**30 / 1e9
    assert 0.9 * usable < weights.value < usable, "the page says that one H100 has too little room"


def test_the_memory_of_gpus_on_the_page_is_that_of_the_profiles() -> None:
    named = re.findall(r"(\d+) GiB of an? ([HB]\d+)\b", " ".join(PAGE.split()))
    found = {name.lower(): int(size) for size, name in named}
    assert found == {name: round(PROFILES[name].memory_gib * PROFILES[name].mem_fraction)
                     for name in ("h100", "h200", "b200")}


def test_the_values_are_valid_and_give_an_endpoint_as_many_gpus_as_the_job() -> None:
    values, spec = yaml_text.load(VALUES), JobSpec.model_validate(yaml_text.load(JOB))
    jsonschema.validate(values, json.loads((ROOT / "helm/eyrie/values.schema.json").read_text()))
    assert S3Work.model_validate(values["cluster"]["stages"]["work"]).states == "ranged"
    assert values["cluster"]["serving"]["placement"]["num_gpus"] == spec.engine.tp_size == spec.serve.placement.num_gpus

"""Plans of targets that need several GPUs or are quantised, against arithmetic that is done here."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans import LLAMA_8B, QWEN_235B
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan, StagePlan
from eyrie_api.planning.facts import facts_of
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_work import DataFacts, TargetFacts
from eyrie_api.planning.preflight import plan
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.target_files import INDEX
from eyrie_api.settings import Settings
from tests.api.samples import job_spec
from tests.api.test_preflight import on_cluster

H200 = "NVIDIA-H200"
DATA = DataFacts(20_000, 250.0, 500.0, "a sample")
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129_280,
    "intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def job(num_gpus: int = 8, tp_size: int = 1, **changes: Any) -> JobSpec:
    return job_spec(**({
        "target": {"model": "org/large", "dtype": "bfloat16"}, "data": {"sources": [{"path": "org/chats"}]},
        "engine": {"kind": "sglang", "tp_size": tp_size},
        "placement": {"every": {"num_gpus": num_gpus, "gpu_type": H200}}} | changes))


def planned(spec: JobSpec, target: TargetFacts = LLAMA_8B) -> Plan:
    return make_plan(derive(spec), target, None, data_facts=DATA)


def stage(plan: Plan, name: str) -> StagePlan:
    return next(one for one in plan.stages if one.stage == name)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of which the Hub cache has the config.json of the 235B target alone."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--large/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN_235B))
    return on_cluster(tmp_path)


# Sizes of targets.


def test_a_mixture_has_the_parameters_that_its_authors_publish() -> None:
    qwen, deepseek = (facts_of(config, "config.json") for config in (QWEN_235B, DEEPSEEK_V3))
    assert qwen.parameters / 1e9 == pytest.approx(235.1, abs=0.1)
    assert qwen.active_parameters / 1e9 == pytest.approx(22.2, abs=0.1)
    # "671B total parameters with 37B activated for each token" (arXiv:2412.19437).
    assert deepseek.parameters / 1e9 == pytest.approx(671.0, abs=0.1)
    assert deepseek.active_parameters / 1e9 == pytest.approx(37.6, abs=0.1)
    assert deepseek.key_values == 61 * (512 + 64)
    assert qwen.key_values == 2 * 94 * 4 * 128


def test_a_quantised_target_is_planned_with_the_bytes_that_sglang_loads(cluster: Settings, tmp_path: Path) -> None:
    def weights() -> float:
        return next(one.value for one in plan(job(tp_size=4), cluster).assumptions if one.name == "target weights")

    embeddings = 2 * 151_936 * 4096
    layer = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096 + 128 * 3 * 4096 * 1536 + 128 * 4096 + 2 * 4096
    assert weights() == pytest.approx((2 * embeddings + 94 * layer * (1 + 4 / 128**2)) / 1e9, rel=1e-3)
    index = {"metadata": {"total_size": 236_400_000_000}, "weight_map": {"a": "not-here.safetensors"}}
    (tmp_path / "models--org--large/snapshots/main" / INDEX).write_text(json.dumps(index))
    assert weights() == 236.4

"""A mixture of experts, Qwen2-MoE, in the real SGLang: its states, and drafting for it through Eyrie's model package.

The mixture computes what the shipped Llama computes (`mixture_target`), so the trained drafter fits it, and the rounds
that SGLang's mixture accepts must be those of the reference engine with the Llama, which knows no mixture.
"""

from pathlib import Path

import pytest
import torch

from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.sglang.capture_states import SglangStates
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments, launch_environment
from eyrie_workers.sglang.process import SglangServer, plugin_root, start_sglang
from eyrie_workers.sglang.servers import ServerPlan
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.state_source import open_local, reference_states
from tests.sglang.mixture_target import write_mixture
from tests.sglang.servers import MODEL, READY_S, STAND_IN, environment, let_stages_start_it, program
from tests.sglang.test_parity import NARROW_TREE, assert_proven, parity

LAYERS = (2, 8, 13)


def test_states_of_a_mixture_are_those_of_transformers_expert_by_expert(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_stages_start_it(monkeypatch)
    target = write_mixture(tmp_path / "mixture", spread=0.5)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 2048, (length,), generator=generator) for length in (7, 120)]
    wanted = reference_states(target, "float32", texts, LAYERS, torch.device("cpu"))
    plan = ServerPlan("sglang", TargetSpec(model=str(target), dtype="float32"), 2)
    with SglangStates(plan, LAYERS, 120, tmp_path / "servers", Stage(tmp_path, quiet=True)) as source:
        aux, _ = source.packed_states(texts, LAYERS)
    theirs = torch.cat([torch.stack([row[layer] for layer in LAYERS], dim=1) for row in wanted])
    torch.testing.assert_close(aux, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_changed_answer_of_a_mixture_is_judged_by_its_model_in_transformers(tmp_path: Path) -> None:
    source = open_local(write_mixture(tmp_path / "mixture"), "float32")
    prompt = [1, 40, 41, 42]
    _, last = source.packed_states([torch.tensor(prompt)], ())
    best, second = source.output_head.logits(last[-1]).topk(2).indices.tolist()
    found = explain(source, "p", prompt, [best], [second])
    assert found is not None
    assert (found.position, found.first.chosen, found.is_tie("float32")) == (0, best, False)
    assert explain(source, "p", prompt, [best], [best]) is None


@pytest.mark.slow
def test_drafts_for_a_mixture_are_accepted_as_the_reference_engine_accepts_them_for_the_same_dense_model(
        plain: SglangServer, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    target = write_mixture(tmp_path / "mixture", spread=0.0)
    plan = LaunchPlan(
        target=read_target(str(target), read_config(target)), drafter=read_drafter(str(drafter), read_config(drafter)),
        machine=profile("cpu"), served_model_name=MODEL, setting=Setting(tree=NARROW_TREE), dtype="float32",
        port=free_port(), max_running_requests=8, context_length=1024,
        plugin_root=f"{STAND_IN}:{plugin_root(tmp_path)}")
    server = start_sglang((*launch_arguments(plan), "--skip-server-warmup"), tmp_path / "logs", prefix=program(),
                          environment=environment() | launch_environment(plan))
    try:
        server.wait_ready(READY_S)
        assert_proven(parity("mixture", plain, server, drafter, NARROW_TREE, prompts))
    finally:
        server.stop(0.0)

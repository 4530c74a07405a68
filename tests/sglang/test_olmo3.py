"""Olmo 3 in the real SGLang: Eyrie's model package against our own engine, on a small random target.

The target is Olmo 3 in every respect that is easily got wrong: windows over half of its layers, YaRN on the others,
norms behind. The drafter is fitted for seconds to the very answers asked for, so that drafts are accepted and rejected
at every position: with a random one, wrong layers would look like right ones.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.measure.parity import request_answers
from eyrie_workers.measure.parity_reference import Reference
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments, launch_environment
from eyrie_workers.sglang.process import SglangServer, start_sglang
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.config import choose_aux_layers
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.sglang.fitted_drafter import fit_drafter
from tests.sglang.servers import READY_S, ROOT, STAND_IN, environment, program
from tests.tiny import tiny_target

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
TREE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=7)
WINDOW, NEW_TOKENS = 12, 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    path = tiny_target(tmp_path_factory.mktemp("olmo") / "olmo3", "olmo3", seed=11, num_layers=8, hidden_size=64,
                       initializer_range=0.12, sliding_window=WINDOW,
                       layer_types=["sliding_attention", "full_attention"] * 4)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]  # spelled as the published Olmo 3 checkpoints spell it
    config |= {"rope_theta": 10000.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.1386294361,
        "beta_fast": 32.0, "beta_slow": 1.0}}
    (path / "config.json").write_text(json.dumps(config))
    return load_target(path)


def prompts(num: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 320, (5 + 7 * (index % 4),), generator=generator).tolist() for index in range(num)]


@pytest.fixture(scope="module")
def drafter(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = [Request(f"r{index}", prompt, NEW_TOKENS) for index, prompt in enumerate(prompts(16, seed=2))]
    answers = Engine(target, max_concurrency=32).generate(asked)
    texts = [torch.tensor([*request.prompt_ids, *answer.token_ids])
             for request, answer in zip(asked, answers, strict=True)]
    aux_layers = choose_aux_layers(target.config.num_layers, target.config.layer_types).aux_layers
    assert aux_layers == (2, 4, 6)
    answered = [(len(request.prompt_ids), text, aux, last) for request, text, (aux, last) in zip(
        asked, texts, target.hidden_states(texts, aux_layers), strict=True)]
    assert target.path is not None
    return fit_drafter(tmp_path_factory.mktemp("drafter") / "olmo3-drafter", target.path, target.config, aux_layers,
                       answered)


def serve(target: TargetModel, drafter: Path, setting: Setting, logs: Path) -> SglangServer:
    assert target.path is not None
    plan = LaunchPlan(
        target=read_target(str(target.path), json.loads((target.path / "config.json").read_text())),
        drafter=read_drafter(str(drafter), json.loads((drafter / "config.json").read_text())), setting=setting,
        machine=profile("cpu"), served_model_name="olmo", port=free_port(), dtype="float32", max_running_requests=4,
        plugin_root=f"{STAND_IN}{os.pathsep}{ROOT / 'workers'}")
    return start_sglang((*launch_arguments(plan), "--skip-server-warmup"), logs, prefix=program(),
                        environment=environment() | launch_environment(plan))


@pytest.fixture(scope="module")
def servers(target: TargetModel, drafter: Path,
            tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SglangServer]]:
    logs = tmp_path_factory.mktemp("logs")
    settings = {"off": OFF, "chain": Setting(tree=CHAIN), "tree": Setting(tree=TREE)}
    running = {name: serve(target, drafter, setting, logs / name) for name, setting in settings.items()}
    try:
        for server in running.values():
            server.wait_ready(READY_S)
        yield running
    finally:
        for server in running.values():
            server.stop(0.0)


@pytest.mark.parametrize(("name", "tree"), [("chain", CHAIN), ("tree", TREE)])
def test_sglang_serves_olmo3_losslessly_and_accepts_what_our_engine_accepts(
        name: str, tree: DraftTreeShape, servers: dict[str, SglangServer], target: TargetModel, drafter: Path) -> None:
    assert target.path is not None
    asked = prompts(16, seed=2)[:8]
    assert max(map(len, asked)) > WINDOW
    answers = [request_answers("sglang", servers[one].url, "olmo", asked, NEW_TOKENS) for one in ("off", name)]
    report = Reference(target.path, drafter, "sglang", tree, "float32").replay_parity(asked, *answers)
    assert report.passed, report.reasons
    assert report.identical == report.prompts == len(asked)
    assert report.histogram == report.reference_histogram
    assert min(report.histogram) > 0, "every number of accepted drafts has to occur, or it is not compared"

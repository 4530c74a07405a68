"""Small random targets of the architectures in the table of targets, in the real SGLang: their states are those of
transformers, and drafting for them changes no answer.

The drafter is fitted for seconds to the very answers asked for, on states of the target's model in transformers, so
that drafts are accepted and rejected. Most of these architectures Eyrie does not compute: answers are compared, and
rounds are not. `catalog.RUN_IN_SGLANG` says which are run.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.processes import free_port
from eyrie_workers.sglang.capture_states import SglangStates
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments, launch_environment
from eyrie_workers.sglang.managed_engine import generate
from eyrie_workers.sglang.process import SglangServer, start_sglang
from eyrie_workers.sglang.servers import ServerPlan
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.state_source import open_local, reference_states
from tests.architectures.catalog import ARCHITECTURES, COMMON, RUN_IN_SGLANG
from tests.sglang.fitted_drafter import fit_drafter
from tests.sglang.servers import READY_S, ROOT, STAND_IN, environment, let_stages_start_it, program
from tests.tiny import tiny_target

TREE = DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=7)
LAYERS, NEW_TOKENS, VOCABULARY = (2, 4, 5), 40, 320

PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"scoring_func": "sigmoid"},
    # YaRN, which SGLang requires of this class on CPUs.
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_theta": 10000.0,
                    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                                     "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
}
"""Fields of published checkpoints that transformers 5 does not write; rotation in place of `rope_parameters`."""

OTHERWISE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},  # SGLang's class has no window
}
IN_SHORT = ("deepseek_v3",)
ELSEWHERE = ("llama", "qwen2_moe", "olmo3")
"""Run by test_parity, test_mixture and test_olmo3."""


def write_target(directory: Path, model_type: str) -> Path:
    path = tiny_target(directory, model_type, seed=5, num_layers=8, initializer_range=0.12,
                       **(COMMON | ARCHITECTURES[model_type] | OTHERWISE.get(model_type, {})))
    if model_type in PUBLISHED:
        config = json.loads((path / "config.json").read_text())
        if "rope_theta" in PUBLISHED[model_type]:
            del config["rope_parameters"]
        (path / "config.json").write_text(json.dumps(config | PUBLISHED[model_type]))
    return path


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [Request(f"r{index}", torch.randint(3, VOCABULARY, (5 + 7 * (index % 4),), generator=generator).tolist(),
                    NEW_TOKENS) for index in range(8)]


@contextmanager
def served(target: Path, drafter: Path | None, setting: Setting, logs: Path) -> Iterator[SglangServer]:
    plan = LaunchPlan(
        target=read_target(str(target), json.loads((target / "config.json").read_text())), setting=setting,
        drafter=None if drafter is None else read_drafter(
            str(drafter), json.loads((drafter / "config.json").read_text())),
        machine=profile("cpu"), served_model_name="target", port=free_port(), dtype="float32",
        max_running_requests=4, plugin_root=f"{STAND_IN}{os.pathsep}{ROOT / 'workers'}")
    server = start_sglang((*launch_arguments(plan), "--skip-server-warmup"), logs, prefix=program(),
                          environment=environment() | launch_environment(plan))
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop(0.0)


def answers_of(server: SglangServer) -> tuple[dict[str, tuple[int, ...]], list[int]]:
    """Token ids by request, and rounds by accepted drafts."""
    found, _ = generate(server.url, requests(), 4, 256, truncate=False)
    histograms = [one.accepted_histogram for one in found]
    return ({one.id: tuple(one.token_ids) for one in found},
            [sum(one[k] for one in histograms if k < len(one)) for k in range(max(map(len, histograms), default=0))])


@pytest.fixture(params=[one if one in IN_SHORT else pytest.param(one, marks=pytest.mark.slow)
                        for one in RUN_IN_SGLANG if one not in ELSEWHERE])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    let_stages_start_it(monkeypatch)
    return write_target(tmp_path / "target", request.param)


def test_states_are_those_of_transformers_and_drafting_changes_no_answer(target: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (7, 100)]
    wanted = reference_states(target, "float32", texts, LAYERS, torch.device("cpu"))
    plan = ServerPlan("sglang", TargetSpec(model=str(target), dtype="float32"), 2)
    with SglangStates(plan, LAYERS, 100, tmp_path / "servers", Stage(tmp_path, quiet=True)) as source:
        aux, _ = source.packed_states(texts, LAYERS)
    theirs = torch.cat([torch.stack([row[layer] for layer in LAYERS], dim=1) for row in wanted])
    torch.testing.assert_close(aux, theirs, atol=2e-3, rtol=1e-3)

    with served(target, None, OFF, tmp_path / "plain") as server:
        plain, _ = answers_of(server)
    local, answered = open_local(target, "float32"), []
    for asked in requests():
        text = torch.tensor([*asked.prompt_ids, *plain[asked.id]])
        answered.append((len(asked.prompt_ids), text, *local.packed_states([text], LAYERS)))
    drafter = fit_drafter(tmp_path / "drafter", target, local.config, LAYERS, answered)
    with served(target, drafter, Setting(tree=TREE), tmp_path / "drafted") as server:
        drafted, rounds = answers_of(server)
    assert drafted == plain
    assert sum(rounds[1:]) > 0, f"no draft was accepted: {rounds}"

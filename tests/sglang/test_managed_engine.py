"""SGLang as a `DecodingEngine`: the contract of all engines, and servers that end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.sglang.managed_engine import GREEDY_ONLY, SglangEngine
from eyrie_workers.sglang.process import SglangServer
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage
from tests.sglang.servers import descendants, let_stages_start_it
from tests.workers.engines.engine_contract import DRAFTED, LOOKUP, OFF, check_contract

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
PLAN = ServerPlan("sglang", TargetSpec(model="quickstart", dtype="float32"), max_concurrency=4)


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    let_stages_start_it(monkeypatch)


@pytest.fixture
def uses(drafter: Path) -> dict[str, DrafterUse]:
    return {OFF: DrafterUse(), DRAFTED: DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN)),
            LOOKUP: DrafterUse(setting=Setting(method="ngram", tree=CHAIN)),
            "missing": DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN.model_copy()))}


@pytest.fixture
def engine(uses: dict[str, DrafterUse], tmp_path: Path) -> Iterator[SglangEngine]:
    engine = SglangEngine(PLAN, uses, tmp_path / "servers", Stage(tmp_path), ServerHistory(tmp_path, "d"))
    yield engine
    engine.stop()


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(id=f"r{index}", prompt_ids=prompt, max_new_tokens=16) for index, prompt in enumerate(prompts[:5])]


def test_sglang_keeps_the_contract_of_every_engine(
        engine: SglangEngine, uses: dict[str, DrafterUse], prompts: list[list[int]]) -> None:
    check_contract(engine, {name: uses[name] for name in (OFF, DRAFTED, LOOKUP)}, requests(prompts))
    assert engine.refusal(uses[DRAFTED].setting, 1.0) == GREEDY_ONLY
    assert engine.refusal(uses[OFF].setting, 1.0) is None


def test_a_server_that_is_killed_is_started_again_and_counted_and_servers_replace_each_other(
        uses: dict[str, DrafterUse], prompts: list[list[int]], tmp_path: Path) -> None:
    others = descendants(os.getpid())
    engine = SglangEngine(PLAN, uses, tmp_path / "servers", Stage(tmp_path), ServerHistory(tmp_path, "d"))
    engine._pool.capacity = 1  # as on a machine with memory for one
    try:
        assert engine.start({name: uses[name] for name in (OFF, DRAFTED)}) == {}
        before = engine.generate(OFF, requests(prompts), 2).answers
        (launcher,) = engine._pool._servers.values()
        assert isinstance(launcher, SglangServer)
        os.killpg(launcher.process.pid, signal.SIGKILL)
        after = engine.generate(OFF, requests(prompts), 2).answers
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        assert engine.describe().restarts == 1
        # A later run of the stage reports both without starting a server.
        again = SglangEngine(PLAN, uses, tmp_path / "servers", Stage(tmp_path), ServerHistory(tmp_path, "d"))
        assert (again.describe().restarts, again.describe().version) == (1, "0.5.23")
        assert "ServerRestarted" in (tmp_path / "events.jsonl").read_text()
        drafted = engine.generate(DRAFTED, requests(prompts), 2).answers  # takes the place of the other
        assert [one.token_ids for one in drafted] == [one.token_ids for one in before]
        assert engine._pool.resident == (DRAFTED,)
        assert descendants(os.getpid()) > others
    finally:
        engine.stop()
    assert descendants(os.getpid()) <= others


def test_a_drafter_that_sglang_cannot_load_is_reported_with_the_servers_error_and_others_start(
        uses: dict[str, DrafterUse], prompts: list[list[int]], drafter: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in drafter.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    uses[DRAFTED] = DrafterUse(drafter_dir=str(damaged), setting=Setting(tree=CHAIN))
    engine = SglangEngine(PLAN, uses, tmp_path / "servers", Stage(tmp_path), ServerHistory(tmp_path, "d"))
    try:
        failed = engine.start({name: uses[name] for name in (OFF, DRAFTED)})
        assert list(failed) == [DRAFTED]
        assert isinstance(failed[DRAFTED], EngineFailed)
        assert "variant drafted: SGLang ended" in failed[DRAFTED].message
        assert "header" in failed[DRAFTED].message.lower(), failed[DRAFTED].message
        assert engine.generate(OFF, requests(prompts)[:1], 1).answers[0].whole
    finally:
        engine.stop()

"""Prove where not all servers fit the memory: in turn. In this tier because it takes long; the engine is embedded."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.session import read_suites
from eyrie_workers.sglang import servers as managed
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan, ServerPool
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.prove import CheckResult, Proof, checks_of, run_check, select_prompts, variants_to_compare
from tests.workers.stages.test_prove import CHAIN, servers_of, spec_in, tuned


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_servers_that_do_not_fit_together_are_measured_in_turn_and_one_that_ended_is_replaced_but_not_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ProveSpec(concurrencies=(1,), requests=4, max_new_tokens=8, parity_prompts=2, system_prompt="")
    spec, stage = spec_in(tmp_path, tuned(None), prove=small), Stage(tmp_path)
    plan = ServerPlan("embedded", spec.target, 2, 1)
    uses = variants_to_compare(spec, DrafterUse(drafter_dir=spec.drafter_dir, setting=CHAIN), stage)
    history = ServerHistory(tmp_path, "d")
    pool = ServerPool(plan, uses, tmp_path / "variants", stage, history, capacity=1)
    prompts = select_prompts(spec, read_suites(spec, stage), spec.benchmark.suites)
    proof = Proof(spec, stage, plan, uses, prompts, prompts,
                  JsonlLedger(tmp_path / "found.jsonl", CheckResult, "d"), history, pool=pool)
    answers, load = checks_of(spec, len(uses))
    try:
        found = run_check(proof, pool, load).load
        assert found is not None
        assert {(one.variant, one.total.completed) for one in found.levels} == {("off", 8), ("candidate", 4)}
        assert [(one.variant, one.compared, one.identical) for one in found.comparisons] == [("candidate", 4, 4)]
        assert pool.resident == ("off",)  # measured last, after the candidate
        [server] = servers_of(tmp_path)
        os.kill(server, signal.SIGKILL)
        answered = run_check(proof, pool, answers).answers
        assert answered is not None
        assert [one.token_ids for one in answered.plain] == [one.token_ids for one in answered.drafted]
        assert pool.history.restarts == 1
        monkeypatch.setattr(managed, "MOST_RESTARTS", 0)
        [server] = servers_of(tmp_path)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"ended \d times"):  # what the check found before counts for nothing
            run_check(proof, pool, replace(answers, run=lambda _: CheckResult(question="any")))
    finally:
        pool.stop()
    assert servers_of(tmp_path) == []

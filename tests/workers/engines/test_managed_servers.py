"""The command lines of a comparison's servers: equal in everything but drafting."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape, EngineKind, EngineSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_workers.sglang.local_hardware import GpuGroup
from eyrie_workers.sglang.servers import DrafterUses, ServerPlan, command_line, server_key

CHAIN = Setting(tree=DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3))
TREE = Setting(tree=DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=8))
SHARED = ("--attention-backend", "--page-size", "--max-running-requests", "--context-length", "--dtype")


@pytest.fixture
def uses(drafter: Path) -> DrafterUses:
    return {"off": DrafterUse(), "candidate": DrafterUse(drafter_dir=str(drafter), setting=CHAIN),
            "incumbent": DrafterUse(drafter_dir=str(drafter), setting=TREE)}


def value(line: tuple[str, ...], flag: str) -> str | None:
    return line[line.index(flag) + 1] if flag in line else None


def plan_for(kind: EngineKind, target: Path, machine: str) -> ServerPlan:
    return ServerPlan(kind, TargetSpec(model=str(target), dtype="bfloat16"), 8, machine=profile(machine))


def test_sglang_variants_differ_in_drafting_and_in_the_fraction_of_the_remaining_memory(
        target: Path, uses: DrafterUses, tmp_path: Path) -> None:
    # A B200 would run a chain and a tree on different attention backends if SGLang chose for each.
    plan = plan_for("sglang", target, "b200")
    lines = {name: command_line(plan, name, uses, tmp_path) for name in uses}
    for flag in SHARED:
        assert len({value(line, flag) for line in lines.values()}) == 1, flag
    assert value(lines["off"], "--speculative-algorithm") is None
    assert value(lines["candidate"], "--speculative-eagle-topk") == "1"
    assert value(lines["incumbent"], "--speculative-eagle-topk") == "2"
    fractions = [float(value(line, "--mem-fraction-static") or "nan") for line in lines.values()]
    left, taken = 1.0, []
    for fraction in fractions:  # each takes its fraction of what those before it have left
        taken.append(left * fraction)
        left -= left * fraction
    assert taken == pytest.approx([taken[0]] * 3, rel=0.02)
    assert left > taken[0]  # the reference engine of the parity gate fits too


def test_servers_have_equal_keys_where_all_that_they_are_started_with_is_equal(
        target: Path, drafter: Path, uses: DrafterUses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for("sglang", target, "h100")
    copied = Path(shutil.copytree(drafter, tmp_path / "copied"))
    uses["candidate"] = DrafterUse(drafter_dir=str(copied), setting=CHAIN)

    def key(name: str, uses: DrafterUses = uses, num_shares: int = 4, gpus: GpuGroup = ("0",),
            plan: ServerPlan = plan) -> str:
        return server_key(plan, name, uses, num_shares, gpus)

    off, candidate = key("off"), key("candidate")
    # Whatever it is compared with, as long as that changes no argument.
    assert key("baseline", {"baseline": DrafterUse(), "drafted": uses["candidate"]}) == off
    others = [candidate, key("incumbent"), key("off", num_shares=5), key("off", gpus=("1",)),
              key("off", plan=replace(plan, max_concurrency=9))]
    monkeypatch.setenv("EYRIE_ANY", "1")
    others.append(key("off"))
    monkeypatch.delenv("EYRIE_ANY")
    (copied / "model.safetensors").write_bytes(b"another")
    others.append(key("candidate"))
    assert len({off, *others}) == 1 + len(others)
    assert key("off") == off


def test_servers_share_the_fraction_that_the_job_names(target: Path, uses: DrafterUses, tmp_path: Path) -> None:
    engine = EngineSpec.model_validate({"kind": "sglang", "sglang_arguments": {"mem_fraction_static": 0.4}})
    plan = replace(plan_for("sglang", target, "h100"), engine=engine)
    fractions = [value(command_line(plan, name, uses, tmp_path), "--mem-fraction-static") for name in uses]
    assert fractions == ["0.1", "0.111", "0.125"]  # equal shares of 0.4, of what is left; one for the reference engine


def test_a_windowed_candidate_and_an_incumbent_that_drafts_trees_share_an_attention_backend(
        target: Path, drafter: Path, uses: DrafterUses, tmp_path: Path) -> None:
    windowed = tmp_path / "windowed"
    windowed.mkdir()
    config = json.loads((drafter / "config.json").read_text())
    (windowed / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    uses["candidate"] = DrafterUse(drafter_dir=str(windowed), setting=CHAIN)
    # An L40S would run all but the windowed one on flashinfer.
    lines = [command_line(plan_for("sglang", target, "l40s"), name, uses, tmp_path) for name in uses]
    assert [value(line, "--attention-backend") for line in lines] == ["fa3", "fa3", "fa3"]
    uses["candidate"] = DrafterUse(drafter_dir=str(windowed), setting=TREE)
    with pytest.raises(Unlaunchable, match="window"):
        command_line(plan_for("sglang", target, "l40s"), "candidate", uses, tmp_path)


def test_on_cpu_the_kv_pool_is_limited_to_what_the_requests_can_fill(
        target: Path, uses: DrafterUses, tmp_path: Path) -> None:
    line = command_line(plan_for("sglang", target, "cpu"), "off", uses, tmp_path)
    assert value(line, "--max-total-tokens") == str(8 * int(value(line, "--context-length") or 0))


def test_the_embedded_engine_gets_a_map_that_one_drafter_can_apply(
        target: Path, uses: DrafterUses, tmp_path: Path) -> None:
    operating_map = OperatingMap(points=tuple(
        OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
        for load, setting in ((1, CHAIN), (4, OFF))))
    candidate = uses["candidate"].model_copy(update={"map": operating_map})
    plan = plan_for("embedded", target, "cpu")
    assert plan.is_adaptive(candidate)
    line = command_line(plan, "candidate", {"candidate": candidate}, tmp_path)
    assert DrafterUse.model_validate_json(value(line, "--use") or "") == candidate
    fixed = value(command_line(plan, "candidate", uses, tmp_path), "--use")
    assert DrafterUse.model_validate_json(fixed or "") == uses["candidate"]
    assert not plan_for("sglang", target, "h100").is_adaptive(candidate)  # the map has no adaptive form


def test_sglang_follows_a_map_on_gpus_alone_and_with_drafters_of_eagle_alone(
        target: Path, uses: DrafterUses) -> None:
    points = (OperatingPoint(concurrency=1, setting=CHAIN, speedup=1.0, tokens_per_s=1.0, measured=True),)
    operating_map = OperatingMap(points=points, adaptive={"1": {"candidate_steps": [2]}})
    candidate = uses["candidate"].model_copy(update={"map": operating_map})
    assert plan_for("sglang", target, "h100").is_adaptive(candidate)
    assert not plan_for("sglang", target, "cpu").is_adaptive(candidate)
    language_model = candidate.model_copy(update={"drafter_dir": str(target)})
    assert not plan_for("sglang", target, "h100").is_adaptive(language_model)

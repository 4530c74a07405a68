"""`sweep.families: [auto]` becomes the families that the plan predicts near the fastest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyrie_api.contract.families import FAMILIES
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.facts import Facts, read_config
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.likely_families import predicted_speeds
from eyrie_api.planning.resolve import resolve
from tests.api.samples import job_spec, target_directory

TAUS = {"eagle3": 2.0, "eagle1": 1.9, "medusa": 1.5, "dflash": 1.9}


@pytest.fixture(autouse=True)
def taus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in FAMILIES.items():
        monkeypatch.setitem(FAMILIES, name, replace(row, published_tau=TAUS.get(name)))


def facts_of(target: Path, device: Any = "gpu") -> Facts:
    return Facts(local_device=device, target=target, config=read_config(target))


def families(model: Path, device: Any = "gpu", **changes: Any) -> tuple[str, ...]:
    spec = job_spec(**{"target": {"model": str(model), "dtype": "bfloat16"}, "sweep": {"families": ["auto"]},
                       "engine": "sglang"} | changes)
    return resolve(spec, facts_of(model, device)).spec.sweep.families


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_directory(tmp_path / "target", vocab_size=32000)


def test_those_within_a_tenth_of_the_fastest_are_trained_the_fastest_first(target: Path) -> None:
    facts = facts_of(target)
    assert facts.sizes is not None
    for engine in ("sglang", "embedded"):
        spec = job_spec(target={"model": str(target), "dtype": "bfloat16"}, engine=engine)
        speeds = predicted_speeds(spec, facts.sizes, "LlamaForCausalLM", None, True)
        assert set(speeds) == {name for name in TAUS if engine == "embedded" or FAMILIES[name].sglang_algorithm}
        found = families(target, engine=engine)
        assert list(found) == sorted(found, key=lambda name: -speeds[name])
        assert {*found} == {name for name, speed in speeds.items() if speed >= 0.9 * max(speeds.values())}


def test_a_predicted_speed_is_tau_times_the_seconds_of_a_pass_over_those_of_a_round(target: Path) -> None:
    facts = facts_of(target)
    assert facts.sizes is not None
    spec = job_spec(target={"model": str(target), "dtype": "bfloat16"}, engine="embedded", prove={"concurrencies": [2]})
    found = predicted_speeds(spec, facts.sizes, "LlamaForCausalLM", None, False)["eagle1"]
    rates, weights, hidden = Rates(), facts.sizes.parameters, facts.sizes.hidden_size
    layer = 2 * hidden**2 + facts.sizes.attention_parameters(hidden) + facts.sizes.mlp_parameters(
        facts.sizes.intermediate_size) + 32_000 * hidden

    def seconds(read: int, tokens: int) -> float:
        return read / rates.single + read * (tokens - 1) / rates.prefill

    # Two users: a pass over a token of each, against one over five of each and four passes of the drafter.
    assert found == pytest.approx(1.9 * seconds(weights, 2) / (seconds(weights, 10) + seconds(4 * layer, 2)))


def test_verifications_that_sglang_does_not_have_for_a_family_leave_it_out(
        target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "standalone", replace(FAMILIES["standalone"], published_tau=9.0))
    assert families(target)[0] == "standalone"
    assert "standalone" not in families(target, tune={"verifications": ["target", "rejection"]})


def test_what_the_engine_cannot_compute_for_the_target_is_not_among_them(target: Path, tmp_path: Path) -> None:
    assert not {"medusa", "dflash"} & {*families(target, "cpu", target={"model": str(target)})}
    other = target_directory(tmp_path / "other", vocab_size=32000, architectures=["MixtralForCausalLM"])
    assert families(other) == ("eagle1",)


def test_a_variant_of_some_families_leaves_the_others_out(target: Path) -> None:
    assert families(target, drafter={"fc_norm": True}) == ("eagle3",)
    with pytest.raises(InvalidInput, match="no family that was compared suits this job"):
        families(target, drafter={"markov_head": "rnn"})


def test_auto_stands_alone_needs_the_target_and_is_a_name_of_no_family(target: Path) -> None:
    with pytest.raises(InvalidInput, match="auto next to others"):
        families(target, sweep={"families": ["auto", "eagle3"]})
    spec = job_spec(target={"model": "org/name"}, sweep={"families": ["auto"]})
    with pytest.raises(InvalidInput, match=r"config\.json is not on this machine") as refused:
        resolve(spec, Facts())
    assert "name families" in refused.value.hint
    with pytest.raises(ValidationError, match="is not a drafter family"):
        job_spec(drafter={"family": "auto"})
    assert spec.trained_families == ()

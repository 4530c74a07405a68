"""The short form of the model-based campaign (`make campaign-model`), and that it can fail."""

import random
from dataclasses import replace
from datetime import datetime

import pytest

from benchmarks.campaigns import model_plane, model_rollout
from benchmarks.campaigns.model import Counts, play, run
from benchmarks.campaigns.model_plane import PlaneWorld, RuleBroken
from benchmarks.campaigns.model_rollout import RolloutWorld
from benchmarks.campaigns.report import Campaign
from eyrie_api.contract.job import JobSpec
from eyrie_operator.endpoints.plan import EndpointPlan, Reject
from eyrie_operator.jobs.reconcile import ActionPlan, ObservedJob, reconcile
from eyrie_operator.manifests.rollout import RolloutState, apply_plan


def test_random_kills_and_changes_bring_every_job_and_endpoint_to_one_end() -> None:
    campaign = Campaign("model", seed=1, seconds=float("inf"), out=None)
    counted = run(campaign, worlds=12)
    assert campaign.findings == []
    assert all(one.worlds == 12 and one.kills > 10 for one in counted.values())


def test_a_reconciler_that_forgets_its_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(spec: JobSpec, seen: ObservedJob, now: datetime) -> ActionPlan:
        return reconcile(spec, replace(seen, decision=None), now)

    monkeypatch.setattr(model_plane, "reconcile", forgetful)
    with pytest.raises(RuleBroken, match="an attempt is decided once"):
        play(PlaneWorld, 1, Counts())


def play_rollouts(num: int) -> None:
    for seed in range(num):
        play(RolloutWorld, seed, Counts())


def test_a_rollout_that_deletes_the_old_engine_before_the_service_leads_to_the_new_one_is_found(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(before: RolloutState, plan: EndpointPlan, now: datetime) -> RolloutState:
        wanted = apply_plan(before, plan, now)
        return replace(wanted, engines=tuple(one for one in wanted.engines if one != before.serving))

    monkeypatch.setattr(model_rollout, "apply_plan", hasty)
    with pytest.raises(RuleBroken, match="no engine is deleted while the Service selects it"):
        play_rollouts(20)


def test_a_rejection_that_is_forgotten_leaves_a_failed_revision_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(before: RolloutState, plan: EndpointPlan, now: datetime) -> RolloutState:
        return before if any(isinstance(one, Reject) for one in plan.actions) else apply_plan(before, plan, now)

    monkeypatch.setattr(model_rollout, "apply_plan", forgetful)
    with pytest.raises(RuleBroken, match="no revision that failed serves"):
        play_rollouts(20)


def test_the_same_seed_plays_the_same_world() -> None:
    def events(seed: int) -> list[list[tuple[int, str, str | None]]]:
        world = PlaneWorld(random.Random(seed))
        for _ in range(60):
            world.change()
            world.look()
        return [job.events for job in world.jobs]

    assert events(7) == events(7)

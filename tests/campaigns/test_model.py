"""The short form of the model-based campaign (`make campaign-model`), and that it can fail."""

import random
from dataclasses import replace
from datetime import datetime

import pytest

from eyrie_api.v1alpha1.job import JobSpec
from eyrie_operator.jobs.reconcile import ObservedJob, Plan, reconcile
from tests.campaigns import model_plane
from tests.campaigns.model import Counts, play, run
from tests.campaigns.model_plane import PlaneWorld, RuleBroken
from tests.campaigns.report import Campaign


def test_random_kills_and_changes_bring_every_job_and_endpoint_to_one_end() -> None:
    campaign = Campaign("model", seed=1, seconds=60.0, out=None)
    counted = run(campaign, worlds=12)
    assert campaign.findings == []
    assert all(one.worlds == 12 and one.kills > 10 for one in counted.values())


def test_a_reconciler_that_forgets_its_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(spec: JobSpec, seen: ObservedJob, now: datetime) -> Plan:
        return reconcile(spec, replace(seen, decision=None), now)

    monkeypatch.setattr(model_plane, "reconcile", forgetful)
    with pytest.raises(RuleBroken, match="an attempt is decided once"):
        play(PlaneWorld, 1, Counts())


def test_the_same_seed_plays_the_same_world() -> None:
    def events(seed: int) -> list[list[tuple[int, str, str | None]]]:
        world = PlaneWorld(random.Random(seed))
        for _ in range(60):
            world.change()
            world.look()
        return [job.events for job in world.jobs]

    assert events(7) == events(7)

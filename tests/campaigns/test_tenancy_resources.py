"""The part of the tenancy campaign about custom resources finds nothing, and can fail."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.campaigns.report import Campaign
from benchmarks.campaigns.tenancy import WORDS, state_of
from benchmarks.campaigns.tenancy_resources import PROJECTS, apply_objects
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.settings import Settings
from tests.api.access.harness import two_projects


@pytest.mark.parametrize(("projects", "rules"), [
    (PROJECTS, set()),
    ({**PROJECTS, "south-jobs": "north"}, {"nothing of the project is changed"})], ids=["mapped", "mapped to north"])
def test_objects_of_a_namespace_change_north_only_where_the_namespace_is_norths(
        tmp_path: Path, projects: Mapping[str, str], rules: set[str]) -> None:
    settings = Settings(home=tmp_path / "home", rate_limit_per_minute=10_000_000)
    settings.home.mkdir()
    database, campaign = Database(settings.resolved_database_url), Campaign("tenancy", 1, 0.0, None)
    upgrade(database)
    with two_projects(settings, database) as harness:
        apply_objects(campaign, settings, database, harness, WORDS,
                      lambda: state_of(database, harness.a, settings.home), 0.0, projects)
    database.close()
    assert {one["rule"] for one in campaign.findings} - {"nothing of another project is read"} == rules

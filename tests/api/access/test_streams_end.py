"""A stream held open by a key ends when the key does."""

import pytest

from eyrie_api.database.engine import Database
from eyrie_api.http import middleware
from eyrie_api.settings import Settings
from tests.api.access.harness import JOBS, TOKEN, two_projects
from tests.api.samples import job_body

DATABASES = ("sqlite",)


def test_a_revoked_key_s_event_stream_ends_at_a_heartbeat(settings: Settings, database: Database,
                                                          monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(middleware, "_REAUTHENTICATE_S", 0.1)
    with two_projects(settings.model_copy(update={"sse_heartbeat_s": 0.2}), database) as harness:
        job_id = harness.ask(harness.b.secret, "POST", JOBS, json=job_body()).json()["id"]
        headers = {"Authorization": f"Bearer {harness.b.secret}", "Accept": "text/event-stream"}
        with harness.http.stream("GET", f"{JOBS}/{job_id}/events", headers=headers) as stream:
            lines = stream.iter_lines()
            while next(lines) != ": heartbeat":
                pass
            revoked = harness.ask(TOKEN, "POST", f"/v1alpha1/keys/{harness.b.ids['key_id']}/revoke")
            assert revoked.status_code == 200
            assert set(lines) <= {": heartbeat", ""}, "and then no more"
        assert harness.ask(harness.b.secret, "GET", JOBS).status_code == 401
    assert "rror" not in caplog.text, "in order"

"""Figures of an endpoint: what of its history they show, by REST too, and why one is absent."""

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.figures import Figure
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.figures.endpoint_values import endpoint_with_history, serve_drafter, try_canary, watch
from tests.api.samples import ManualClock

DATABASES = ("sqlite",)  # figures have no SQL of their own: what they read is tested on both elsewhere

BASE = "/v1alpha1/endpoints/chat/figures"


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    return TestClient(create_app(settings, database=database), base_url="http://127.0.0.1:8642")


def rows_of(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    answer = client.get(f"{BASE}/{name}")
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["spec"]["data"]["values"]
    assert {tuple(row) for row in rows} == {tuple(rows[0])}, "every row has the same fields"
    return rows


def test_acceptance_over_time_has_every_window_with_the_limits_of_the_watch_and_marks_what_changed(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    first = endpoint_with_history(database, clock)
    rows = rows_of(client, "acceptance")
    windows = client.get("/v1alpha1/endpoints/chat/history", params={"kind": "window"}).json()["items"]
    shown = [row for row in rows if row["what"] == "window"]
    assert [(row["tau"], row["revision"]) for row in shown] == [
        (one["figures"]["tau"], one["revision"]) for one in windows]
    assert {(row["proven_tau"], row["drift_below"], row["rollback_below"]) for row in shown} == {(3.0, 2.55, 1.5)}
    marks = [(row["what"], row["revision"], row["label"]) for row in rows if row["what"] != "window"]
    assert marks == [
        ("activated", first, f"revision {first} activated"),
        ("activated", first + 1, f"revision {first + 1} activated"),
        ("rolled-back", first + 1, f"revision {first + 1} rolled-back, revision {first} activated"),
        ("activated", first, ""), ("drift", first, f"revision {first} drift")], "those at one time share a label"
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)


def test_acceptance_by_position_is_of_each_revision_and_of_the_latest_window(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    revision = serve_drafter(database, clock)
    watch(database, clock, revision, (3.0, 1.5))
    rows = rows_of(client, "acceptance-by-position")
    assert [(row["series"], row["position"], row["tokens"], row["accepted"], row["acceptance"]) for row in rows] == [
        (f"revision {revision}, 2 windows", 1, 400, 240, 0.6), (f"revision {revision}, 2 windows", 2, 240, 150, 0.625),
        (f"revision {revision}, latest window", 1, 200, 80, 0.4),
        (f"revision {revision}, latest window", 2, 80, 50, 0.625)]


def test_the_list_says_when_a_figure_changed_last_and_differs_after_each_window(
        client: httpx.Client, database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.database.endpoint_history.KEPT_WINDOWS", 2)
    revision = serve_drafter(database, clock)
    watch(database, clock, revision, (3.0, 3.0))
    before = client.get(BASE).json()
    watch(database, clock, revision, (3.0,))
    after = client.get(BASE).json()
    assert [one["name"] for one in after["items"]] == ["acceptance", "acceptance-by-position"]
    assert [one["name"] for one in after["absent"]] == ["canary"]
    assert [one["changed_at"] for one in after["items"]] > [one["changed_at"] for one in before["items"]]


def test_a_promotion_long_before_the_first_window_that_is_kept_does_not_stretch_the_axis(
        client: httpx.Client, database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.database.endpoint_history.KEPT_WINDOWS", 3)
    watch(database, clock, serve_drafter(database, clock), (3.0,) * 10)
    assert {row["what"] for row in rows_of(client, "acceptance")} == {"window"}


STEP = ("revision", "share", "verdict", "seconds", "answered", "tau", "tau_low", "tau_high", "proven_tau")


def test_each_step_of_a_canary_has_its_share_its_verdict_and_the_acceptance_that_was_judged(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    first = endpoint_with_history(database, clock)
    rows = rows_of(client, "canary")
    assert [tuple(row[name] for name in STEP) for row in rows] == [
        (first + 1, 0.2, "passed", 10, 5, 2.8, 2.3, 3.3, 3.0), (first + 1, 0.5, "passed", 10, 5, 2.8, 2.3, 3.3, 3.0),
        (first + 2, 0.2, "rejected", 10, 5, None, 2.3, 3.3, 3.0)]
    assert rows[0]["step"] == f"revision {first + 1}, 20%: passed"
    assert rows[2]["finding"] == "CanaryFailed: 2 of its 7 requests failed"
    titles = {one["name"]: one["title"] for one in client.get(BASE).json()["items"]}
    assert titles["canary"] == f"Revision {first + 2} was rejected at 20% of the requests: CanaryFailed"


def test_a_canary_that_runs_is_now_until_another_revision_is_proposed(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    serve_drafter(database, clock)
    endpoints = Endpoints(database, clock)

    def proposed(drafter: str) -> int:
        return endpoints.propose("chat", job_id=None, checkpoint=drafter, tree=DraftTreeShape(), reason="test",
                                 drafter_dir=f"/d/{drafter}").number

    second = proposed("second")
    for share in (0.2, 0.2, 0.5):  # a step that is recorded again after a crash is one step
        endpoints.canary("chat", second, share)
    assert [(row["share"], row["verdict"], row["tau"]) for row in rows_of(client, "canary")] == [
        (0.2, "passed", None), (0.5, "now", None)]
    proposed("third")
    assert [row["verdict"] for row in rows_of(client, "canary")] == ["passed", "given up"]


def test_a_revision_that_is_tried_again_has_another_canary(
        client: httpx.Client, database: Database, clock: ManualClock) -> None:
    serve_drafter(database, clock)
    endpoints = Endpoints(database, clock)
    second = endpoints.propose("chat", job_id=None, checkpoint="b", tree=DraftTreeShape(), drafter_dir="/d/b",
                               reason="test").number
    try_canary(database, clock, second, (0.2,))
    endpoints.reject("chat", second, "EngineDied", "no memory")
    endpoints.roll_back("chat", second)
    try_canary(database, clock, second, (0.2,))
    endpoints.activate("chat", second)
    assert [row["step"] for row in rows_of(client, "canary")] == [
        f"revision {second}, time 1, 20%: rejected", f"revision {second}, time 2, 20%: passed"]


def absent(client: httpx.Client) -> dict[str, str]:
    return {one["name"]: one["reason"] for one in client.get(BASE).json()["absent"]}


def test_where_positions_are_not_known_it_says_so(client: httpx.Client, database: Database, clock: ManualClock) -> None:
    revision = serve_drafter(database, clock, engine="sglang")
    watch(database, clock, revision, (3.0,), positions=False)
    assert list(absent(client)) == ["acceptance-by-position", "canary"]
    assert "not known where SGLang serves" in absent(client)["acceptance-by-position"]
    refused = client.get(f"{BASE}/acceptance-by-position")
    assert refused.status_code == 404
    assert "SGLang" in refused.json()["hint"]
    assert "has the figures acceptance" in client.get(f"{BASE}/pareto").json()["hint"]


def test_without_windows_it_says_why(client: httpx.Client, database: Database, clock: ManualClock) -> None:
    serve_drafter(database, clock)
    assert "no window of acceptance has closed yet" in absent(client)["acceptance"]
    clock.pass_(60.0)
    serve_drafter(database, clock, tau=None)
    assert "without a proven acceptance length" in absent(client)["acceptance"]
    Endpoints(database, clock).roll_back("chat", revision=1)
    Endpoints(database, clock).activate("chat", 1)
    assert "without a drafter" in absent(client)["acceptance"]
    assert client.get("/v1alpha1/endpoints/none/figures").status_code == 404


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_vega_lite_draws_them(theme: Any, client: httpx.Client, database: Database, clock: ManualClock) -> None:
    vl_convert = pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    endpoint_with_history(database, clock)
    for name in ("acceptance", "acceptance-by-position", "canary"):
        figure = Figure.model_validate(client.get(f"{BASE}/{name}").json())
        drawn = vl_convert.vegalite_to_svg(figure.spec | {"config": figure.themes[theme]}, vl_version="5.21")
        assert drawn.count("<path") > figure.rows
        for words in ("NaN", "undefined"):
            assert words not in drawn, name


def test_history_keeps_what_a_window_was_held_against(database: Database, clock: ManualClock) -> None:
    watch(database, clock, serve_drafter(database, clock), (3.0,))
    (window,) = Histories(database).read("chat", kind="window").items
    assert window.figures == {"tau": 3.0, "rounds": 200.0, "proven_tau": 3.0, "drift_below": 2.55,
                              "rollback_below": 1.5, "requests": 90.0, "tokens": 5400.0, "seconds": 60.0,
                              "accepted/1": 160.0, "accepted/2": 100.0}

"""Authentication with API keys: cached, revoked within seconds, no more rights than the creator, kept secret."""

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from sqlalchemy import delete, event, inspect, select, text, update
from sqlalchemy.exc import DatabaseError

from eyrie_api.access.roles import Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import CreateMember, CreateProject
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.projects import USED_EVERY_S, ApiKeys, Projects
from eyrie_api.database.tables import ApiKeyRow, AuditRow, Base
from eyrie_api.errors import Forbidden, InvalidInput, Unauthorized
from eyrie_api.http.authentication import CACHED_S, LOCAL, Authenticator
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.access.harness import JOBS, KEYS, TOKEN, WEBHOOKS, two_projects
from tests.api.access.receiver import receiving
from tests.api.access.test_oidc import Elapsed
from tests.api.samples import ManualClock, job_body, job_spec

ROOT = Scope(Principal(subject="token", roles={"*": "admin"}))


def test_a_key_is_asked_for_once_in_some_seconds_and_its_use_is_noted_once_a_minute(
        settings: Settings, database: Database, clock: ManualClock) -> None:
    elapsed, statements = Elapsed(), []
    callers = Authenticator(settings.model_copy(update={"token": TOKEN}), database, clock, elapsed)
    key, secret = ApiKeys(database, clock, ROOT).create("ci", "operator")
    assert callers.cached(secret) is None
    principal = callers.authenticate(secret)
    assert principal.roles == {"default": "operator"}

    event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    for _ in range(100):
        assert callers.cached(secret) == principal
    assert statements == [], "no statement at all"
    elapsed.now += CACHED_S + 1
    assert callers.cached(secret) is None
    callers.authenticate(secret)
    assert not [one for one in statements if one.startswith("UPDATE")]
    elapsed.now += CACHED_S + 1
    clock.pass_(USED_EVERY_S + 1)
    callers.authenticate(secret)
    assert len([one for one in statements if one.startswith("UPDATE")]) == 1
    used = next(one for one in ApiKeys(database, clock).list() if one.id == key.id).last_used_at
    assert used == clock()


def test_a_key_that_was_revoked_rotated_or_has_expired_is_refused_within_seconds(
        settings: Settings, database: Database, clock: ManualClock) -> None:
    elapsed, keys = Elapsed(), ApiKeys(database, clock, ROOT)
    callers = Authenticator(settings.model_copy(update={"token": TOKEN}), database, clock, elapsed)
    revoked, rotated = (keys.create(name, "operator") for name in ("a", "b"))
    expiring = keys.create("c", "viewer", expires_at=clock() + timedelta(seconds=100))
    for _key, secret in (revoked, rotated, expiring):
        callers.authenticate(secret)
    keys.revoke(revoked[0].id)
    again, fresh = keys.rotate(rotated[0].id, overlap_s=50.0)
    elapsed.now += CACHED_S + 0.1
    with pytest.raises(Unauthorized, match="revoked"):
        callers.authenticate(revoked[1])
    assert callers.authenticate(rotated[1]).roles == callers.authenticate(fresh).roles, "for the overlap both go"
    assert (again.role, again.project) == ("operator", "default")
    clock.pass_(101)
    elapsed.now += CACHED_S + 0.1
    for _key, secret in (rotated, expiring):
        with pytest.raises(Unauthorized, match=r"revoked|expired"):
            callers.authenticate(secret)


def test_a_rotated_key_can_be_revoked_while_its_overlap_lasts(
        settings: Settings, database: Database, clock: ManualClock) -> None:
    keys = ApiKeys(database, clock, ROOT)
    old, secret = keys.create("ci", "operator")
    keys.rotate(old.id, overlap_s=3600.0)
    assert keys.revoke(old.id).revoked_at == clock()
    callers = Authenticator(settings.model_copy(update={"token": TOKEN}), database, clock)
    with pytest.raises(Unauthorized, match="revoked"):
        callers.authenticate(secret)


def test_keys_end_with_the_membership_of_their_creator(database: Database, clock: ManualClock) -> None:
    projects = Projects(database, clock, ROOT)
    projects.create(CreateProject(name="north"))
    issuer = "https://issuer"
    given: list[tuple[Literal["subject", "group"], str]] = [("subject", "ada"), ("subject", "bob"), ("group", "all")]
    members = {value: projects.add_member("north", CreateMember(kind=kind, value=value, role="admin"), issuer)
               for kind, value in given}

    def key_of(subject: str) -> str:
        made = ApiKeys(database, clock, Scope(Principal(subject=subject, roles={"north": "admin"})))
        clock.pass_(1)
        return made.create("ci", "admin")[0].id

    by_ada, by_bob, by_group = (key_of(f"user:{issuer}#{one}") for one in ("ada", "bob", "eve"))
    second = key_of(f"key:{by_ada}")

    def revoked() -> set[str]:
        return {one.id for one in ApiKeys(database, clock).list() if one.revoked_at is not None}

    projects.remove_member("north", members["ada"].id)
    assert revoked() == {by_ada, second}
    projects.remove_member("north", members["all"].id)
    assert revoked() == {by_ada, second, by_group}
    assert by_bob not in revoked()


def test_while_the_database_is_away_an_api_key_gets_a_503(
        settings: Settings, database: Database, serve: Callable[..., Any]) -> None:
    if not database.is_sqlite:
        pytest.skip("the tests share one PostgreSQL server, which cannot be stopped for one of them")
    _key, secret = ApiKeys(database, scope=ROOT).create("ci", "operator")
    with serve(settings.model_copy(update={"token": TOKEN}), database) as server:
        file = Path(str(database.engine.url.database))
        assert file.stat().st_mode & 0o777 == 0o600
        file.rename(file.with_suffix(".away"))
        file.mkdir()
        database.engine.dispose()
        answer = httpx.get(server.url + "/v1alpha1/jobs", headers={"Authorization": f"Bearer {secret}"})
        assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)


def test_no_one_makes_a_key_that_may_do_more_than_they(database: Database, clock: ManualClock) -> None:
    Projects(database, clock, ROOT).create(CreateProject(name="north"))
    narrow = Scope(Principal(subject="key:x", roles={"north": "admin"}, scopes=frozenset({"keys:write", "jobs:read"})))
    with pytest.raises(InvalidInput, match="may not"):
        ApiKeys(database, clock, narrow).create("more", "operator")
    made, _secret = ApiKeys(database, clock, narrow).create("less", "viewer", scopes=frozenset({"jobs:read"}))
    assert made.project == "north"
    with pytest.raises(Forbidden, match="may not keys:write in all projects"):
        ApiKeys(database, clock, narrow).create("all", "viewer", everywhere=True)
    for role in ("viewer", "operator"):
        lower = Scope(Principal(subject="key:y", roles={"north": role}))
        with pytest.raises(Forbidden, match="may not keys:write in project 'north'"):
            ApiKeys(database, clock, lower).create("x", "viewer")


def test_on_loopback_nothing_is_demanded_and_a_key_that_is_shown_counts(
        settings: Settings, database: Database, clock: ManualClock) -> None:
    callers = Authenticator(settings, database, clock)
    assert callers.cached("") is LOCAL
    assert callers.cached("whatever the environment holds") is LOCAL
    _key, secret = ApiKeys(database, clock, ROOT).create("ci", "viewer")
    assert callers.authenticate(secret).roles == {"default": "viewer"}
    with pytest.raises(Unauthorized, match="not a valid API key"):
        callers.authenticate(secret + "-")
    with pytest.raises(Unauthorized, match="requires a bearer token"):
        Authenticator(settings.model_copy(update={"host": "0.0.0.0"}), database).authenticate("")


def test_the_audit_cannot_be_changed_or_deleted(database: Database, clock: ManualClock) -> None:
    Jobs(database, clock, scope=ROOT).submit(derive(job_spec()))
    for statement in (delete(AuditRow), update(AuditRow).values(actor="nobody")):
        with pytest.raises(DatabaseError, match="the audit is kept"), database.writing() as session:
            session.execute(statement)
    if not database.is_sqlite:
        with pytest.raises(DatabaseError, match="the audit is kept"), database.writing() as session:
            session.execute(text("TRUNCATE audit"))
    with database.reading() as session:
        assert [row.verb for row in session.scalars(select(AuditRow))] == ["job.create"]


def test_a_change_that_fails_leaves_no_word_of_itself(database: Database, clock: ManualClock) -> None:
    def half_way() -> None:
        with database.writing() as session:
            record_change(session, ROOT, clock, "job.create", "job/x", "default")
            session.flush()
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    with database.reading() as session:
        assert session.scalars(select(AuditRow)).all() == []


def test_no_secret_is_in_rows_logs_or_answers(settings: Settings, database: Database,
                                              caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with receiving() as receiver, two_projects(settings, database) as harness:
        created = harness.ask(TOKEN, "POST", KEYS, json={"name": "known", "everywhere": True, "role": "admin"})
        key, key_id = created.json()["secret"], created.json()["key"]["id"]
        hook = harness.ask(key, "POST", WEBHOOKS, json={"url": receiver.url}).json()
        answers = [harness.ask(key, method, path, **options).text for method, path, options in _uses(key_id, hook)]
        for delivery in harness.server.control.webhooks.deliveries(hook["webhook"]["id"]):
            harness.server.control.within(ROOT).webhooks.deliver(delivery.id)
        answers += [harness.ask(wrong, "GET", JOBS).text for wrong in (key[:-1], key + "x", key.replace("_", "-"))]
        answers.append(harness.ask(TOKEN[:-1], "GET", JOBS).text)
    everything = "\n".join([*answers, caplog.text, _dump(database, without=("webhooks",))])
    assert key_id in everything, "what was done is there to be searched"
    for secret in (key, key[17:-6], TOKEN, hook["secret"]):
        assert secret not in everything
    assert key[17:-6] not in _dump(database)
    assert hook["secret"] not in _dump(database), "also where it is kept to sign with, it is encrypted"


def _uses(key_id: str, hook: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    webhook = f"{WEBHOOKS}/{hook['webhook']['id']}"
    return [("POST", JOBS, {"json": job_body()}), ("POST", JOBS, {"json": {"target": 1}}), ("GET", JOBS, {}),
            ("GET", KEYS, {}), ("GET", WEBHOOKS, {}), ("POST", webhook + "/ping", {}),
            ("GET", webhook + "/deliveries", {}),
            ("GET", "/v1alpha1/audit", {}), ("GET", "/v1alpha1/whoami", {}), ("GET", "/metrics", {}),
            ("GET", JOBS + "/nothing", {}), ("POST", f"{KEYS}/{key_id}/revoke", {})]


def _dump(database: Database, without: tuple[str, ...] = ()) -> str:
    """Every row of every table."""
    assert set(Base.metadata.tables) < set(inspect(database.engine).get_table_names())
    with database.reading() as session:
        return "\n".join(str(tuple(row)) for table in Base.metadata.sorted_tables if table.name not in without
                         for row in session.execute(select(table)))


def test_what_is_kept_of_a_key_is_a_digest(database: Database, clock: ManualClock) -> None:
    _key, secret = ApiKeys(database, clock, ROOT).create("ci", "viewer")
    with database.reading() as session:
        row = session.scalars(select(ApiKeyRow)).one()
    assert len(row.secret_sha256) == 64
    assert row.secret_sha256 not in secret

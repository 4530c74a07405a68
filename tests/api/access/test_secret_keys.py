"""Webhook secrets at rest: encrypted, readable with every key of the setting, and never used with a wrong one."""

import shlex
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from fastapi.testclient import TestClient
from sqlalchemy import make_url

from eyrie_api.access.keys import NEW_KEY, SecretKeyMissing, SecretKeys, SecretUnreadable
from eyrie_api.contract.access import CreateWebhook
from eyrie_api.database.engine import Database
from eyrie_api.database.webhooks import BACKOFF_S, Webhooks, announce, encrypt_again
from eyrie_api.errors import InvalidInput
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.access.receiver import Receiver, is_genuine, receiving
from tests.api.samples import ManualClock
from tests.servers.postgres import program

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def webhooks_with(database: Database, clock: ManualClock, *keys: str) -> Webhooks:
    return Webhooks(database, clock, allow_private=True, keys=SecretKeys(keys))


def delivered_with(webhooks: Webhooks, webhook_id: str, receiver: Receiver, clock: ManualClock, secret: str) -> bool:
    """Whether a ping arrives with a signature by `secret`."""
    num_before = len(receiver.got)
    webhooks.deliver(webhooks.ping(webhook_id).id)
    return len(receiver.got) == num_before + 1 and is_genuine(secret, *receiver.got[-1], clock().timestamp())


def stored_bytes(database: Database, settings: Settings, directory: Path) -> bytes:
    """All that a thief of the database has: its files and a dump."""
    if database.is_sqlite:
        files = b"".join(path.read_bytes() for path in sorted(settings.home.glob("eyrie.db*")))
        with sqlite3.connect(settings.home / "eyrie.db") as connection:
            return files + "\n".join(connection.iterdump()).encode()
    url, dump = make_url(settings.resolved_database_url), directory / "dump.sql"
    subprocess.run([program("pg_dump"), "--host", str(url.host), "--port", str(url.port), "--username",
                    str(url.username), "--file", dump, str(url.database)], check=True, timeout=60)
    return dump.read_bytes()


def test_neither_the_database_nor_a_dump_contains_a_webhooks_secret(
        database: Database, settings: Settings, clock: ManualClock, receiver: Receiver, tmp_path: Path) -> None:
    webhooks = webhooks_with(database, clock, NEW)
    hook, first = webhooks.create(CreateWebhook(url=receiver.url))
    assert delivered_with(webhooks, hook.id, receiver, clock, first)
    _hook, second = webhooks.rotate(hook.id)
    assert delivered_with(webhooks, hook.id, receiver, clock, second)
    found = stored_bytes(database, settings, tmp_path)
    assert hook.id.encode() in found
    assert [one for one in (first, second, NEW) if one.encode() in found] == []


def test_keys_are_rotated_without_a_failed_delivery(database: Database, clock: ManualClock, receiver: Receiver) -> None:
    hook, secret = webhooks_with(database, clock, OLD).create(CreateWebhook(url=receiver.url))
    for keys in ((OLD, NEW), (NEW, OLD), (NEW,)):
        encrypt_again(database, SecretKeys(keys))
        assert delivered_with(webhooks_with(database, clock, *keys), hook.id, receiver, clock, secret), keys
    with pytest.raises(SecretUnreadable):
        webhooks_with(database, clock, OLD).ping(hook.id)


@pytest.mark.parametrize(("keys", "error"), [((NEW,), SecretUnreadable), ((), SecretKeyMissing)])
def test_with_a_wrong_or_lost_key_nothing_is_sent_and_the_error_names_the_remedy(
        database: Database, clock: ManualClock, receiver: Receiver, keys: tuple[str, ...],
        error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = webhooks_with(database, clock, OLD), webhooks_with(database, clock, *keys)
    hook, secret = right.create(CreateWebhook(url=receiver.url, events=("job.failed",)))
    encrypt_again(database, SecretKeys(keys))
    assert f"eyrie webhooks rotate {hook.id}" in caplog.text
    with pytest.raises(error, match=f"eyrie webhooks rotate {hook.id}") as refused:
        wrong.ping(hook.id)
    delivery = right.ping(hook.id).id
    wrong.deliver(delivery)
    seen = wrong.deliveries(hook.id)[0]
    assert (seen.state, seen.attempts, receiver.got) == ("failed", 1, [])
    assert f"eyrie webhooks rotate {hook.id}" in str(seen.error)
    for said in (caplog.text, str(refused.value), str(seen.error)):
        assert not any(one in said for one in (secret, OLD, NEW))
    if keys:
        _hook, fresh = wrong.rotate(hook.id)
        assert delivered_with(wrong, hook.id, receiver, clock, fresh)


def test_an_event_that_cannot_be_signed_is_sent_once_the_key_is_back(
        database: Database, clock: ManualClock, receiver: Receiver) -> None:
    right = webhooks_with(database, clock, OLD)
    hook, secret = right.create(CreateWebhook(url=receiver.url))
    with database.writing() as session:
        announce(session, clock, "default", "job.failed", {})
    (delivery,) = right.due()
    webhooks_with(database, clock, NEW).deliver(delivery)
    clock.pass_(BACKOFF_S[0] + 1)
    right.deliver(delivery)
    assert right.deliveries(hook.id)[0].state == "delivered"
    assert is_genuine(secret, *receiver.got[0], clock().timestamp())


def ask(settings: Settings, database: Database, path: str, **options: Any) -> Any:
    with TestClient(create_app(settings, database=database), base_url="http://127.0.0.1",
                    raise_server_exceptions=False) as client:
        return client.post(path, **options)


def test_rest_refuses_to_create_a_webhook_without_a_key_and_says_how_to_make_one(
        database: Database, settings: Settings, receiver: Receiver) -> None:
    open_ = settings.model_copy(update={"webhooks_allow_private": True})
    answer = ask(open_, database, "/v1alpha1/webhooks", json={"url": receiver.url})
    if database.is_sqlite:  # one machine: the key was generated
        assert answer.status_code == 201
        return
    assert answer.status_code == 409, answer.text
    assert answer.json()["type"] == "urn:eyrie:problem:SecretKeyMissing"
    assert "EYRIE_SECRET_KEY" in answer.json()["detail"]
    assert NEW_KEY in answer.json()["hint"]


def test_rest_answers_a_ping_whose_secret_is_unreadable_with_a_problem(
        database: Database, settings: Settings, clock: ManualClock, receiver: Receiver) -> None:
    hook, _secret = webhooks_with(database, clock, OLD).create(CreateWebhook(url=receiver.url))
    other = settings.model_copy(update={"webhooks_allow_private": True, "secret_key": NEW})
    answer = ask(other, database, f"/v1alpha1/webhooks/{hook.id}/ping")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:eyrie:problem:SecretUnreadable")
    assert f"eyrie webhooks rotate {hook.id}" in answer.json()["hint"]
    assert ask(other, database, f"/v1alpha1/webhooks/{hook.id}/rotate").status_code == 201
    assert ask(other, database, f"/v1alpha1/webhooks/{hook.id}/ping").status_code == 202


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_the_command_of_the_hint_makes_a_key() -> None:
    name, _, command = NEW_KEY.removeprefix("export ").partition("=")
    key = subprocess.run(["sh", "-c", f"echo {command}"], capture_output=True, text=True, check=True).stdout
    assert Settings.from_env({name: key}).required_secret_keys() == (key.strip(),)
    assert SecretKeys([key.strip()])
    assert shlex.split(NEW_KEY)[0] == "export"


def test_one_machine_generates_its_key_once_for_its_owner_alone_and_not_in_the_database(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    (key,) = settings.required_secret_keys()
    path = settings.home / "secret-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert settings.required_secret_keys() == (key,)
    assert Settings(home=settings.home, secret_key=f"{NEW}, {OLD}").required_secret_keys() == (NEW, OLD, key)
    elsewhere = Settings(home=tmp_path / "other", database_url="postgresql+psycopg://eyrie@db.example/eyrie")
    assert elsewhere.required_secret_keys() == ()
    assert not elsewhere.home.exists()


def test_what_is_not_a_key_is_refused_without_being_repeated(tmp_path: Path) -> None:
    for wrong in ("too-short", NEW[:-2], f"{NEW},", f"{NEW};{OLD}", NEW.replace("=", "+")):
        with pytest.raises(InvalidInput, match=r"EYRIE_SECRET_KEY = <secret>: .*Fernet") as refused:
            Settings.from_env({"EYRIE_SECRET_KEY": wrong})
        assert wrong not in str(refused.value)
    path = tmp_path / "secret-key"
    path.write_text("damaged-key\n")
    with pytest.raises(InvalidInput, match="secret-key must be one or more Fernet keys") as refused:
        Settings(home=tmp_path).required_secret_keys()
    assert "damaged" not in str(refused.value)
    assert NEW not in repr(Settings(secret_key=NEW))

"""Webhooks: signed, one delivery per change, retried with growing delays, abandoned, never sent to a forbidden address.

Against a real receiver on a real port.
"""

import json
from collections.abc import Iterator

import pytest
from standardwebhooks.webhooks import Webhook

from eyrie_api import ssrf_safe_http
from eyrie_api.access.keys import SecretKeys
from eyrie_api.chores.tasks import make_celery
from eyrie_api.chores.worker import ChoreLoop
from eyrie_api.clock import utc_now
from eyrie_api.contract.access import CreateWebhook
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.webhooks import BACKOFF_S, KEPT_S, MAX_FAILURES, Webhooks
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from tests.api.access.harness import SECRET_KEY
from tests.api.access.receiver import Receiver, is_genuine, receiving
from tests.api.samples import ManualClock, ended, job_spec
from tests.waiting import wait_for

KEYS = SecretKeys([SECRET_KEY])


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def webhooks(database: Database, clock: ManualClock) -> Webhooks:
    return Webhooks(database, clock, allow_private=True, keys=KEYS)


def deliver_all(webhooks: Webhooks) -> int:
    due = webhooks.due()
    for one in due:
        webhooks.deliver(one)
    return len(due)


def test_what_happens_is_sent_once_and_signed(database: Database, clock: ManualClock, webhooks: Webhooks,
                                              receiver: Receiver) -> None:
    hook, secret = webhooks.create(CreateWebhook(url=receiver.url))
    jobs, endpoints = Jobs(database, clock), Endpoints(database, clock)
    for kind in ("Succeeded", "Failed", "Cancelled"):
        job = jobs.submit(derive(job_spec(name=f"{kind.lower()}-job")))
        for _ in range(2):
            jobs.save_status(job.id, ended(kind))
    endpoints.create("default", TargetSpec(model="m"), EndpointServeSpec(), "m")
    endpoints.activate("default", 1)
    for checkpoint in ("a", "b"):
        number = endpoints.propose("default", job_id=None, checkpoint=checkpoint, drafter_dir=f"/{checkpoint}",
                                   reason="better").number
        endpoints.activate("default", number)
        endpoints.activate("default", number)
    endpoints.roll_back("default", actor="watch", reason="Worse", message="tau fell")
    endpoints.activate("default", 2)
    for _ in range(2):
        Histories(database, clock).record("default", "drift", "Drifted", "tau stays low", once="drift/2", revision=2)
    promised = [one.argument for one in Outbox(database, clock).pending() if one.task == "deliver"]
    assert sorted(promised) == sorted(webhooks.due()), "the outbox knows of each"
    assert deliver_all(webhooks) == 7
    assert deliver_all(webhooks) == 0
    result = [json.loads(body) for _headers, body in receiver.got]
    assert sorted(one["event"] for one in result) == sorted([
        "job.succeeded", "job.failed", "job.cancelled", "endpoint.promoted", "endpoint.promoted",
        "endpoint.rolled_back", "endpoint.drift"])
    assert {one["project"] for one in result} == {"default"}
    assert next(one for one in result if one["event"] == "endpoint.rolled_back")["endpoint"]["from_revision"] == 3
    for headers, body in receiver.got:
        assert is_genuine(secret, headers, body, clock().timestamp())
        assert not is_genuine(secret, headers, body + b" ", clock().timestamp())
        assert not is_genuine("whsec_b3RoZXI=", headers, body, clock().timestamp())
        assert not is_genuine(secret, headers, body, clock().timestamp() + 3600), "caught and sent again later"
        assert not is_genuine(secret, headers | {"Webhook-Timestamp": "9"}, body, 9.0), "the time is signed too"
    assert {one.state for one in webhooks.deliveries(hook.id)} == {"delivered"}
    clock.pass_(KEPT_S + 1)
    assert webhooks.sweep() == 7


def test_a_delivery_that_fails_is_tried_again_later_under_the_same_id(
        database: Database, clock: ManualClock, webhooks: Webhooks, receiver: Receiver) -> None:
    hook, _secret = webhooks.create(CreateWebhook(url=receiver.url, events=("job.failed",)))
    jobs = Jobs(database, clock)
    jobs.save_status(jobs.submit(derive(job_spec())).id, ended("Succeeded"))
    assert webhooks.due() == (), "nobody asked for that"
    jobs.save_status(jobs.submit(derive(job_spec())).id, ended("Failed"))
    receiver.answers = [500, 302]
    receiver.location = receiver.url
    assert deliver_all(webhooks) == 1
    assert deliver_all(webhooks) == 0, "not at once"
    clock.pass_(BACKOFF_S[0] + 1)
    assert deliver_all(webhooks) == 1
    assert len(receiver.got) == 2, "a redirect is not followed, and is no success"
    assert webhooks.deliveries(hook.id)[0].status == 302
    clock.pass_(BACKOFF_S[1] + 1)
    assert deliver_all(webhooks) == 1
    assert len({headers["Webhook-Id"] for headers, _body in receiver.got}) == 1
    assert webhooks.deliveries(hook.id)[0].state == "delivered"


def test_a_webhook_that_never_answers_is_switched_off_until_a_ping_arrives(
        database: Database, clock: ManualClock, webhooks: Webhooks, receiver: Receiver) -> None:
    hook, _secret = webhooks.create(CreateWebhook(url=receiver.url))
    receiver.answers = [500] * MAX_FAILURES
    for _ in range(MAX_FAILURES):
        webhooks.ping(hook.id)
        deliver_all(webhooks)
    off = webhooks.list()[0]
    assert off.failures == MAX_FAILURES
    assert off.disabled_reason is not None
    jobs = Jobs(database, clock)
    jobs.save_status(jobs.submit(derive(job_spec())).id, ended("Failed"))
    assert webhooks.due() == ()
    webhooks.ping(hook.id)
    assert deliver_all(webhooks) == 1
    assert webhooks.list()[0].disabled_reason is None


def test_a_delivery_whose_worker_died_is_due_again_and_two_workers_do_not_send_it_twice(
        clock: ManualClock, webhooks: Webhooks, receiver: Receiver) -> None:
    hook, _secret = webhooks.create(CreateWebhook(url=receiver.url))
    delivery = webhooks.ping(hook.id)
    assert webhooks._take(delivery.id) is not None
    assert webhooks._take(delivery.id) is None, "in another's hands"
    assert webhooks.due() == ()
    clock.pass_(61)
    assert webhooks.due() == (delivery.id,)
    webhooks.delete(hook.id)
    webhooks.deliver(delivery.id)
    assert receiver.got == []


def test_the_chores_deliver(settings: Settings, database: Database, receiver: Receiver) -> None:
    open_ = settings.model_copy(update={"webhooks_allow_private": True, "reconcile_interval_s": 0.1,
                                       "secret_key": SECRET_KEY})
    webhooks = Webhooks(database, utc_now, allow_private=True, keys=KEYS)
    loop = ChoreLoop(open_, make_celery(open_, lambda _job_id: None, database=database))
    loop.start(60.0)
    try:
        hook, secret = webhooks.create(CreateWebhook(url=receiver.url))
        webhooks.ping(hook.id)
        loop.wake()
        wait_for(lambda: webhooks.deliveries(hook.id)[0].state == "delivered", "the delivery")
    finally:
        loop.stop()
    headers, body = receiver.got[0]
    assert Webhook(secret).verify(body, headers)["event"] == "ping", "by the library that receivers use"


PUBLIC = ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c")
PRIVATE = ("10.0.0.1", "172.16.5.5", "192.168.1.1", "127.0.0.1", "127.9.9.9", "::1", "fd12::1", "::ffff:10.0.0.1",
           "::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::1")
NEVER = ("169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "0.0.0.0",
         "::", "224.0.0.1", "ff02::1", "168.63.129.16", "fd00:ec2::254", "255.255.255.255", "240.0.0.1")


def test_only_public_addresses_are_called_and_some_never() -> None:
    for address in PUBLIC:
        assert ssrf_safe_http.is_allowed(address, allow_private=False)
    for address in (*PRIVATE, "100.64.0.1", "100.100.100.200"):
        assert not ssrf_safe_http.is_allowed(address, allow_private=False), address
    for address in PRIVATE:
        assert ssrf_safe_http.is_allowed(address, allow_private=True), address
    for address in NEVER:
        assert not ssrf_safe_http.is_allowed(address, allow_private=True), address


@pytest.mark.parametrize("url", [
    "ftp://example.com/x", "file:///etc/passwd", "http:///x", "https://user:pw@example.com/", "http://127.0.0.1:8642/",
    "http://[::1]/", "http://169.254.169.254/latest/meta-data", "http://2130706433/", "http://0x7f.1/", "gopher://x/",
    "http://localhost/", "http://exa mple.com/", "http://example.com:99999/"])
def test_a_url_that_leads_inside_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        ssrf_safe_http.post(url, b"{}", {}, allow_private=False)


def test_a_name_with_one_address_inside_is_refused_and_is_resolved_once(receiver: Receiver) -> None:
    asked: list[str] = []

    def two_faced(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    url = receiver.url.replace("127.0.0.1", "rebinding.example")
    assert ssrf_safe_http.post(url, b"{}", {}, allow_private=True, resolve=two_faced) == 204
    assert asked == ["rebinding.example"], "connected to what was looked at"
    assert receiver.got[0][0]["Host"].startswith("rebinding.example")
    with pytest.raises(ssrf_safe_http.AddressRefused):
        ssrf_safe_http.post(url, b"{}", {}, allow_private=True, resolve=two_faced)
    with pytest.raises(ssrf_safe_http.AddressRefused):
        ssrf_safe_http.post(url, b"{}", {}, allow_private=False, resolve=lambda _host, _port: [PUBLIC[0], "10.0.0.1"])
    assert len(receiver.got) == 1


def test_a_webhook_made_when_its_name_led_outside_is_not_sent_inside_later(
        database: Database, clock: ManualClock, receiver: Receiver) -> None:
    with pytest.raises(InvalidInput):
        Webhooks(database, clock).create(CreateWebhook(url=receiver.url))
    hook, _secret = Webhooks(database, clock, allow_private=True, keys=KEYS).create(CreateWebhook(url=receiver.url))
    strict = Webhooks(database, clock, keys=KEYS)
    strict.ping(hook.id)
    assert deliver_all(strict) == 1
    assert receiver.got == []
    assert "not public" in str(strict.deliveries(hook.id)[0].error)

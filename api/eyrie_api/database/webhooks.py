"""The repository of webhooks and their deliveries, and the delivery of events to them.

`announce` writes deliveries inside the transaction of the change they report and enqueues the chore `deliver` for each,
so that there is a delivery for every change and none without one. `deliver` is one attempt; a failed one is due again
with increasing delay (`BACKOFF_S`), and the tick finds it. A delivery may arrive twice, with the same id.

A webhook is disabled after `MAX_FAILURES` failed deliveries in a row; a successful `ping` enables it again. Its secret
is shown once, at its creation, and stored encrypted. An attempt whose secret cannot be decrypted fails before anything
is sent. Deliveries are signed as the Standard Webhooks specification says (standardwebhooks.com), by its library.
"""

import base64
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPException
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session
from standardwebhooks.webhooks import Webhook as Signer

from eyrie_api import ssrf_safe_http
from eyrie_api.access.keys import SecretKeyMissing, SecretKeys, SecretUnreadable
from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import CreateWebhook, Delivery, Webhook, WebhookEvent
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database, rowcount
from eyrie_api.database.outbox import enqueue
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import DeliveryRow, WebhookRow
from eyrie_api.errors import InvalidInput, NotFound

log = logging.getLogger(__name__)

BACKOFF_S = (10.0, 60.0, 300.0, 1800.0, 7200.0, 21600.0)
"""Pauses between attempts, in seconds: seven attempts within nine hours."""

MAX_FAILURES = 5
KEPT_S = 14 * 86400.0
"""How long ended deliveries are kept."""

_ATTEMPT_TIMEOUT_S = 60.0
"""Longer than an attempt takes. Race: a worker may die during one; after this time the delivery is due again."""

_SHOWN = 100


@dataclass(frozen=True)
class Attempt:
    id: str
    event: str
    url: str
    body: bytes
    secret: str = field(repr=False)
    unreadable: str | None = None
    """Why the secret cannot be decrypted."""


def announce(session: Session, clock: Clock, project: str, event: WebhookEvent, payload: Mapping[str, Any]) -> None:
    """Enqueue an event for a project's webhooks, inside the transaction of the change."""
    hooks = select(WebhookRow).where(WebhookRow.project == project, WebhookRow.disabled_reason.is_(None))
    for hook in session.scalars(hooks).all():
        if event in hook.events:
            _add(session, clock, hook, event, payload)


def _add(session: Session, clock: Clock, hook: WebhookRow, event: WebhookEvent,
         payload: Mapping[str, Any]) -> DeliveryRow:
    now = clock()
    delivery_id = "dlv_" + secrets.token_hex(6)
    body = {"delivery": delivery_id, "event": event, "time": now.isoformat(), "project": hook.project, **payload}
    row = DeliveryRow(id=delivery_id, webhook_id=hook.id, event=event, body=json.dumps(body), state="pending",
                      attempts=0, next_at=now, status=None, error=None, created_at=now, ended_at=None)
    session.add(row)
    enqueue(session, "deliver", delivery_id, clock)
    return row


class Webhooks:
    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM, *,
                 allow_private: bool = False, keys: SecretKeys | None = None) -> None:
        self._database, self._clock, self._scope = database, clock, scope
        self._allow_private, self._keys = allow_private, keys or SecretKeys()

    # Requests.

    def create(self, wanted: CreateWebhook) -> tuple[Webhook, str]:
        """A new webhook of the scope's project and its secret. Raises InvalidInput for an invalid URL, or one whose
        address is not allowed; SecretKeyMissing."""
        project = self._scope.home("webhooks:write")
        try:
            ssrf_safe_http.resolve_allowed(ssrf_safe_http.parse_url(wanted.url), allow_private=self._allow_private)
        except OSError:
            raise InvalidInput("url names a host that cannot be resolved", "check its name") from None
        actor = "system" if self._scope.principal is None else self._scope.principal.subject
        secret = _new_secret()
        row = WebhookRow(id="whk_" + secrets.token_hex(6), project=project, url=wanted.url, events=list(wanted.events),
                         secret_encrypted=self._keys.encrypt(secret), failures=0, disabled_reason=None,
                         created_by=actor, created_at=self._clock())
        with self._database.writing() as session:
            session.add(row)
            record_change(session, self._scope, self._clock, "webhook.create", f"webhook/{row.id}", project)
            return render(Webhook, row), secret

    def rotate(self, webhook_id: str) -> tuple[Webhook, str]:
        """Give it a new secret, which signs all further attempts. The former one need not be readable. Raises NotFound,
        Forbidden or SecretKeyMissing."""
        secret = _new_secret()
        with self._database.writing() as session:
            row = self._find(session, webhook_id)
            row.secret_encrypted = self._keys.encrypt(secret)
            record_change(session, self._scope, self._clock, "webhook.rotate", f"webhook/{webhook_id}", row.project)
            return render(Webhook, row), secret

    def list(self) -> tuple[Webhook, ...]:
        """Webhooks that the scope may see, oldest first."""
        query = select(WebhookRow).where(self._scope.sees(WebhookRow.project, "webhooks:write"))
        with self._database.reading() as session:
            rows = session.scalars(query.order_by(WebhookRow.created_at, WebhookRow.id))
            return tuple(render(Webhook, row) for row in rows)

    def delete(self, webhook_id: str) -> None:
        """Delete it with its deliveries. Raises NotFound or Forbidden."""
        with self._database.writing() as session:
            row = self._find(session, webhook_id)
            record_change(session, self._scope, self._clock, "webhook.delete", f"webhook/{webhook_id}", row.project)
            session.delete(row)

    def deliveries(self, webhook_id: str) -> tuple[Delivery, ...]:
        """Its latest deliveries, newest first. Raises NotFound or Forbidden."""
        query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
        with self._database.reading() as session:
            self._find(session, webhook_id)
            rows = session.scalars(query.order_by(DeliveryRow.created_at.desc(), DeliveryRow.id).limit(_SHOWN))
            return tuple(render(Delivery, row) for row in rows)

    def ping(self, webhook_id: str) -> Delivery:
        """Send it a test event. Raises NotFound or Forbidden; SecretKeyMissing or SecretUnreadable for a secret that
        this server cannot decrypt."""
        with self._database.writing() as session:
            hook = self._find(session, webhook_id)
            _secret_of(hook, self._keys)
            row = _add(session, self._clock, hook, "ping", {})
            record_change(session, self._scope, self._clock, "webhook.ping", f"webhook/{webhook_id}", hook.project)
            session.flush()
            return render(Delivery, row)

    # Deliveries, run by chores.

    def due(self, limit: int = 100) -> tuple[str, ...]:
        """Deliveries that are due, the longest waiting first."""
        query = select(DeliveryRow.id).where(DeliveryRow.state == "pending", DeliveryRow.next_at <= self._clock())
        with self._database.reading() as session:
            return tuple(session.scalars(query.order_by(DeliveryRow.next_at).limit(limit)))

    def deliver(self, delivery_id: str) -> None:
        """One attempt, if the delivery is due and no other worker is attempting it."""
        attempt = self._take(delivery_id)
        if attempt is None:
            return
        if attempt.unreadable is not None:
            self._settle(delivery_id, None, attempt.unreadable)
            return
        sent_at = self._clock()
        headers = {"Content-Type": "application/json", "User-Agent": "eyrie", "Eyrie-Event": attempt.event,
                   "Webhook-Id": attempt.id, "Webhook-Timestamp": str(int(sent_at.timestamp())),
                   "Webhook-Signature": Signer(attempt.secret).sign(attempt.id, sent_at, attempt.body.decode())}
        status, failed = None, None
        try:
            status = ssrf_safe_http.post(attempt.url, attempt.body, headers, allow_private=self._allow_private)
        except InvalidInput as error:
            failed = error.message
        except (OSError, HTTPException) as error:  # only its type: the text may quote what the receiver sent
            failed = type(error).__name__
        self._settle(delivery_id, status, failed)

    def sweep(self, older_than_s: float = KEPT_S) -> int:
        """Delete ended deliveries of that age; return how many."""
        before = self._clock() - timedelta(seconds=older_than_s)
        with self._database.writing() as session:
            return rowcount(session, delete(DeliveryRow).where(DeliveryRow.ended_at < before))

    def _take(self, delivery_id: str) -> Attempt | None:
        # Race: two workers may take a delivery at once. The row lock serialises them, and the first moves `next_at`
        # beyond its attempt, so that the second finds it not due.
        now = self._clock()
        with self._database.writing() as session:
            row = session.get(DeliveryRow, delivery_id, with_for_update=True)
            if row is None or row.state != "pending" or row.next_at is None or row.next_at > now:
                return None
            hook = session.get(WebhookRow, row.webhook_id)
            assert hook is not None, "a delivery without its webhook"
            if hook.disabled_reason is not None and row.event != "ping":
                row.state, row.error, row.next_at, row.ended_at = "failed", "the webhook is disabled", None, now
                return None
            row.attempts += 1
            row.next_at = now + timedelta(seconds=_ATTEMPT_TIMEOUT_S)
            body = row.body.encode()
            try:
                return Attempt(row.id, row.event, hook.url, body, _secret_of(hook, self._keys))
            except (SecretKeyMissing, SecretUnreadable) as error:
                return Attempt(row.id, row.event, hook.url, body, "", f"{error.message}; {error.hint}")

    def _settle(self, delivery_id: str, status: int | None, failed: str | None) -> None:
        now = self._clock()
        with self._database.writing() as session:
            row = session.get(DeliveryRow, delivery_id, with_for_update=True)
            hook = None if row is None else session.get(WebhookRow, row.webhook_id, with_for_update=True)
            if row is None or hook is None:  # deleted during the attempt
                return
            row.status, row.error = status, failed
            if status is not None and 200 <= status < 300:
                row.state, row.next_at, row.ended_at = "delivered", None, now
                hook.failures, hook.disabled_reason = 0, None
            elif row.attempts <= len(BACKOFF_S) and row.event != "ping":
                row.next_at = now + timedelta(seconds=BACKOFF_S[row.attempts - 1])
            else:
                row.state, row.next_at, row.ended_at = "failed", None, now
                hook.failures += 1
                if hook.failures >= MAX_FAILURES:
                    hook.disabled_reason = f"{hook.failures} deliveries in a row failed; a successful ping " \
                                           "enables it again"

    def _find(self, session: Session, webhook_id: str) -> WebhookRow:
        row = session.get(WebhookRow, webhook_id)
        absent = NotFound(f"no webhook {webhook_id!r}", "list the webhooks to see their ids")
        if row is None:
            raise absent
        self._scope.check("webhooks:write", row.project, absent)
        return row


def encrypt_again(database: Database, keys: SecretKeys) -> None:
    """Encrypt with the first key what another one has encrypted: the control plane does so at its start. Logs what it
    cannot read."""
    unreadable = []
    with database.writing() as session:
        for row in session.scalars(select(WebhookRow).with_for_update()):
            if not keys.is_current(row.secret_encrypted):
                try:
                    row.secret_encrypted = keys.encrypt(_secret_of(row, keys))
                except (SecretKeyMissing, SecretUnreadable) as error:
                    unreadable.append(error)
    if unreadable:
        log.error("the secrets of %d webhooks cannot be decrypted, and nothing is delivered to them: %s",
                  len(unreadable), unreadable[0])


def _secret_of(row: WebhookRow, keys: SecretKeys) -> str:
    """The secret in plain text. Raises SecretKeyMissing or SecretUnreadable."""
    return keys.decrypt(row.secret_encrypted, f"webhook {row.id}", f"eyrie webhooks rotate {row.id}")


def _new_secret() -> str:
    """32 random bytes in base64, of the alphabet with + and /, as the specification says."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()

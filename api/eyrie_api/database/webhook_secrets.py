"""The secrets of webhook rows, encrypted at rest.

Versions before revision v0005 stored them as plain text. Such a row keeps working without a key, and `encrypt_stored`,
called when the control plane starts, encrypts it as soon as there is one. It sets the plain column to NULL, which an
older program cannot sign with: after a rollback deliveries of that webhook fail before anything is sent, and are due
again.
"""

import logging

from sqlalchemy import select

from eyrie_api.access.secret_keys import NEW_KEY, SecretKeyMissing, SecretKeys, SecretUnreadable
from eyrie_api.database.engine import Database
from eyrie_api.database.tables import WebhookRow

log = logging.getLogger(__name__)


def set_secret(row: WebhookRow, secret: str, keys: SecretKeys) -> None:
    """Store it encrypted. Raises SecretKeyMissing."""
    row.secret, row.secret_encrypted = None, keys.encrypt(secret)


def secret_of(row: WebhookRow, keys: SecretKeys) -> str:
    """The secret in plain text. Raises SecretKeyMissing or SecretUnreadable."""
    if row.secret_encrypted is None:
        assert row.secret is not None, "a webhook without a secret"
        return row.secret
    return keys.decrypt(row.secret_encrypted, f"webhook {row.id}", f"eyrie webhooks rotate {row.id}")


def encrypt_stored(database: Database, keys: SecretKeys) -> None:
    """Encrypt plain secrets, and those that another than the first key has encrypted. Logs what it cannot read."""
    unreadable, num_plain = [], 0
    with database.writing() as session:
        for row in session.scalars(select(WebhookRow).with_for_update()):
            num_plain += row.secret_encrypted is None
            if row.secret_encrypted is not None and keys.is_current(row.secret_encrypted):
                continue
            try:
                set_secret(row, secret_of(row, keys), keys)
            except (SecretKeyMissing, SecretUnreadable) as error:
                unreadable.append(error)
    if num_plain and not keys:
        log.warning("the secrets of %d webhooks are stored in plain text: %s", num_plain, NEW_KEY)
    elif unreadable:
        log.error("the secrets of %d webhooks cannot be decrypted, and nothing is delivered to them: %s",
                  len(unreadable), unreadable[0])
    if num_plain and keys and not database.erase_free_space():
        log.warning("webhook secrets are encrypted, but free pages of the SQLite file may still hold plain ones: "
                    "run VACUUM on it while the control plane is down")

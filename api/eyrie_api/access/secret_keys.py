"""Encryption of stored secrets with Fernet keys: the first encrypts, all decrypt.

Webhook secrets are the only stored secrets that must be read back, because deliveries are signed with them; of API keys
only digests are stored. The keys come from `Settings.required_secret_keys` and are never in the database. Several keys
are a rotation: at its start the control plane encrypts again, with the first key, what another one has encrypted
(`eyrie_api.database.webhooks`).
"""

from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken

from eyrie_api.errors import Conflict

NEW_KEY = "export EYRIE_SECRET_KEY=$(openssl rand -base64 32 | tr '+/' '-_')"
"""Shell command that makes a key."""


class SecretKeyMissing(Conflict):
    """The server has no key to encrypt or decrypt stored secrets with."""

    exit_code = 78  # EX_CONFIG
    reason = "SecretKeyMissing"


class SecretUnreadable(Conflict):
    """None of the server's keys decrypts a stored secret."""

    exit_code = 78  # EX_CONFIG
    reason = "SecretUnreadable"


class SecretKeys:
    """The server's keys; there may be none."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(Fernet(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def encrypt(self, plain: str) -> str:
        """Raises SecretKeyMissing."""
        if not self._keys:
            raise SecretKeyMissing("EYRIE_SECRET_KEY is not set on this server, and secrets are stored only encrypted",
                                   f"ask its administrator to set it: {NEW_KEY}")
        return self._keys[0].encrypt(plain.encode()).decode()

    def decrypt(self, encrypted: str, owner: str, remedy: str) -> str:
        """The secret of `owner`. Raises SecretKeyMissing or SecretUnreadable, whose hints name the remedy for a lost
        key."""
        if not self._keys:
            raise SecretKeyMissing(f"the secret of {owner} is encrypted, and this server's EYRIE_SECRET_KEY is not set",
                                   f"set it to the key in use before; if that is lost: {remedy}")
        for key in self._keys:
            try:
                return key.decrypt(encrypted).decode()
            except InvalidToken:
                continue
        raise SecretUnreadable(f"the secret of {owner} is encrypted with a key that EYRIE_SECRET_KEY does not contain",
                               f"append that key to it after a comma; if it is lost: {remedy}")

    def is_current(self, encrypted: str) -> bool:
        """Whether the first key has encrypted it."""
        try:
            self._keys[0].decrypt(encrypted)
        except (InvalidToken, IndexError):
            return False
        return True

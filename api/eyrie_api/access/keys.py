"""API keys: creation and verification; and the keys that encrypt stored secrets. Pure but for the random generator.

    eyk_<id>_<secret><check>       id 12 and secret 43 characters of base 62, check 6

The id finds the row; of the secret only a SHA-256 is stored. The secret has 256 random bits, so neither salt nor a slow
hash is needed: it cannot be guessed, nor recovered from a stolen row. The check is a CRC-32: it tells a mistyped or
truncated key from a wrong one without a database query, and lets secret scanners recognise a committed key.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import Sequence
from datetime import datetime

from cryptography.fernet import Fernet, InvalidToken
from pydantic import Field

from eyrie_api.access.roles import ACTIONS, Principal
from eyrie_api.contract.access import Action, Role
from eyrie_api.contract.model import Frozen
from eyrie_api.errors import Conflict, InvalidInput, Unauthorized

PREFIX = "eyk"
_ALPHABET = string.digits + string.ascii_letters
_ID_LENGTH, _SECRET_LENGTH, _CHECK_LENGTH = 12, 43, 6  # 62**43 > 2**256
_FORM = re.compile(rf"{PREFIX}_([0-9A-Za-z]{{{_ID_LENGTH}}})_([0-9A-Za-z]{{{_SECRET_LENGTH}}})"
                   rf"([0-9A-Za-z]{{{_CHECK_LENGTH}}})")


class KeyRecord(Frozen):
    """The stored part of a key."""

    id: str
    name: str = Field(min_length=1, max_length=63)
    """Chosen by its owner."""

    secret_sha256: str = Field(repr=False)
    roles: dict[str, Role]
    scopes: frozenset[Action] | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None = None


class NewKey(Frozen):
    """A new key with its secret, before the secret is discarded."""

    text: str = Field(repr=False)
    """Shown once."""

    record: KeyRecord


def create_key(name: str, creator: Principal, roles: dict[str, Role], now: datetime, *, expires_at: datetime | None,
         scopes: frozenset[Action] | None = None) -> NewKey:
    """A new key. Raises InvalidInput when it would have more rights than its creator, would be valid for longer than
    the creator's own key, or has expired already."""
    if expires_at is not None and expires_at <= now:
        raise InvalidInput(f"expires_at {expires_at.isoformat()} has passed", "give a time in the future")
    if creator.expires_at is not None and (expires_at is None or expires_at > creator.expires_at):
        until = "never expires" if expires_at is None else f"is valid until {expires_at.isoformat()}"
        raise InvalidInput(f"expires_at: {creator.subject} ends at {creator.expires_at.isoformat()}, and a key that it "
                           f"makes {until}", "let it end before that, or make it with a key that is valid for longer")
    record = KeyRecord(id=_random(_ID_LENGTH), name=name, secret_sha256="", roles=roles, scopes=scopes,
                       created_by=creator.subject, created_at=now, expires_at=expires_at)
    held = principal_of(record)
    for project in roles:
        beyond = sorted(action for action in ACTIONS
                        if held.allows(action, project) and not creator.allows(action, project))
        if beyond:
            raise InvalidInput(f"roles[{project!r}]: {creator.subject} may not {beyond[0]} there, nor may its keys",
                               "give a lower role, or scopes within your own rights")
    secret = _random(_SECRET_LENGTH)
    body = f"{PREFIX}_{record.id}_{secret}"
    return NewKey(text=body + _check(body), record=record.model_copy(update={"secret_sha256": _digest(secret)}))


def id_of(text: str) -> str:
    """The id in a key, to look up its record. Raises Unauthorized for a malformed or mistyped key."""
    match = _FORM.fullmatch(text)
    if match is None or not hmac.compare_digest(_check(text[:-_CHECK_LENGTH]), match[3]):
        raise Unauthorized("the bearer token is not a valid API key", f"a key begins with {PREFIX}_ and must be "
                           "copied completely; create a new one if it is lost")
    return match[1]


def verify_key(text: str, record: KeyRecord | None, now: datetime) -> Principal:
    """The principal of a key. Raises Unauthorized, with the same message for a wrong secret and an unknown id."""
    secret = text[-_SECRET_LENGTH - _CHECK_LENGTH:-_CHECK_LENGTH]
    stored_digest = record.secret_sha256 if record is not None else _digest("")
    if not hmac.compare_digest(_digest(secret), stored_digest) or record is None or record.id != id_of(text):
        raise Unauthorized("unknown API key", "check that it was created on this server, or create a new one")
    if record.revoked_at is not None and record.revoked_at <= now:
        raise Unauthorized(f"API key {record.id} was revoked", "create a new one")
    if record.expires_at is not None and record.expires_at <= now:
        raise Unauthorized(f"API key {record.id} expired at {record.expires_at.isoformat()}", "create a new one")
    return principal_of(record)


def principal_of(record: KeyRecord) -> Principal:
    """The principal of a record, verified or not."""
    return Principal(subject=f"key:{record.id}", roles=record.roles, scopes=record.scopes,
                     expires_at=record.expires_at)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _check(body: str) -> str:
    number, text = zlib.crc32(body.encode()), ""
    for _ in range(_CHECK_LENGTH):
        number, rest = divmod(number, len(_ALPHABET))
        text = _ALPHABET[rest] + text
    return text


NEW_KEY = "export EYRIE_SECRET_KEY=$(openssl rand -base64 32 | tr '+/' '-_')"
"""Shell command that makes a key."""


class SecretKeyMissing(Conflict):
    """The server has no key to encrypt or decrypt stored secrets with."""

    exit_code = 78  # EX_CONFIG


class SecretUnreadable(Conflict):
    """None of the server's keys decrypts a stored secret."""

    exit_code = 78  # EX_CONFIG


class SecretKeys:
    """The Fernet keys that encrypt stored secrets: the first encrypts, all decrypt. There may be none.

    Webhook secrets are the only stored secrets that must be read back, because deliveries are signed with them. The
    keys come from `Settings.required_secret_keys` and are never in the database. Several keys are a rotation: at its
    start the control plane encrypts again, with the first key, what another one has encrypted
    (`webhooks.encrypt_again`).
    """

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

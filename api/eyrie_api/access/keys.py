"""PURE but for the dice: API keys. What is handed out once, what is kept, and whether the two belong together.

    eyk_<id>_<secret><check>       id 12 and secret 43 characters of base 62, check 6

The id finds the row; of the secret only a SHA-256 is kept. It is 256 random bits, so no salt and no slow hash is
needed: nobody guesses it, and a stolen row does not give it away. The check is a CRC-32, for people and scanners: a key
mistyped or cut off is told apart from a wrong one without a look at the database, and one committed by mistake is
found by its form.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from datetime import datetime

from pydantic import Field

from eyrie_api.access.roles import ACTIONS, Principal
from eyrie_api.errors import InvalidInput, Unauthorized
from eyrie_api.v1alpha1.access import Action, Role
from eyrie_api.v1alpha1.model import Frozen

PREFIX = "eyk"
_ALPHABET = string.digits + string.ascii_letters
_ID_LENGTH, _SECRET_LENGTH, _CHECK_LENGTH = 12, 43, 6  # 62**43 > 2**256
_FORM = re.compile(rf"{PREFIX}_([0-9A-Za-z]{{{_ID_LENGTH}}})_([0-9A-Za-z]{{{_SECRET_LENGTH}}})"
                   rf"([0-9A-Za-z]{{{_CHECK_LENGTH}}})")


class KeyRecord(Frozen):
    """What is kept of a key."""

    id: str
    name: str = Field(min_length=1, max_length=63)
    """What its owner calls it."""

    secret_sha256: str = Field(repr=False)
    roles: dict[str, Role]
    scopes: frozenset[Action] | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None = None


class NewKey(Frozen):
    """A key in the one moment in which it is whole."""

    text: str = Field(repr=False)
    """To be shown once."""

    record: KeyRecord


def mint(name: str, creator: Principal, roles: dict[str, Role], now: datetime, *, expires_at: datetime | None,
         scopes: frozenset[Action] | None = None) -> NewKey:
    """A new key. Raises InvalidInput when it would do more than its creator, or has expired already."""
    if expires_at is not None and expires_at <= now:
        raise InvalidInput(f"expires_at {expires_at.isoformat()} has passed", "give a time to come")
    record = KeyRecord(id=_random(_ID_LENGTH), name=name, secret_sha256="", roles=roles, scopes=scopes,
                       created_by=creator.subject, created_at=now, expires_at=expires_at)
    held = principal_of(record)
    for project in roles:
        beyond = sorted(action for action in held_actions(held, project) if not creator.allows(action, project))
        if beyond:
            raise InvalidInput(f"roles[{project!r}]: {creator.subject} may not {beyond[0]} there, nor may their keys",
                               "give a lower role, or scopes that you hold yourself")
    secret = _random(_SECRET_LENGTH)
    body = f"{PREFIX}_{record.id}_{secret}"
    return NewKey(text=body + _check(body), record=record.model_copy(update={"secret_sha256": _digest(secret)}))


def id_of(text: str) -> str:
    """The id within a key, to look its record up. Raises Unauthorized for what is no key, or one mistyped."""
    found = _FORM.fullmatch(text)
    if found is None or not hmac.compare_digest(_check(text[:-_CHECK_LENGTH]), found[3]):
        raise Unauthorized("the bearer token is no API key of this form", f"a key begins with {PREFIX}_ and is "
                           "copied whole; ask for a new one if it is lost")
    return found[1]


def proved(text: str, record: KeyRecord | None, now: datetime) -> Principal:
    """Whom a key stands for. Raises Unauthorized; for a wrong secret and an unknown id in the same words."""
    secret = text[-_SECRET_LENGTH - _CHECK_LENGTH:-_CHECK_LENGTH]
    kept = record.secret_sha256 if record is not None else _digest("")
    if not hmac.compare_digest(_digest(secret), kept) or record is None or record.id != id_of(text):
        raise Unauthorized("this API key is not known", "check that it is of this server, or ask for a new one")
    if record.revoked_at is not None and record.revoked_at <= now:
        raise Unauthorized(f"API key {record.id} was revoked", "ask for a new one")
    if record.expires_at is not None and record.expires_at <= now:
        raise Unauthorized(f"API key {record.id} expired at {record.expires_at.isoformat()}", "ask for a new one")
    return principal_of(record)


def principal_of(record: KeyRecord) -> Principal:
    """Whom a record stands for, proved or not."""
    return Principal(subject=f"key:{record.id}", roles=record.roles, scopes=record.scopes)


def held_actions(principal: Principal, project: str) -> frozenset[Action]:
    """Everything it may do in a project."""
    return frozenset(action for action in ACTIONS if principal.allows(action, project))


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

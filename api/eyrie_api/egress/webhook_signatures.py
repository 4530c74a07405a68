"""PURE: how a webhook's delivery is signed, and how its receiver checks that.

    Eyrie-Delivery   id of the delivery; the same when it is tried again, so that a receiver can do it once
    Eyrie-Event      what happened, e.g. job.succeeded
    Eyrie-Timestamp  seconds since 1970 when it was sent
    Eyrie-Signature  v1=<hex>, HMAC-SHA256 under the webhook's secret over `<timestamp>.<body>`

The timestamp is under the signature, so a delivery that somebody caught cannot be sent again an hour later. Receivers
compare in constant time and refuse what is older than a few minutes; `is_genuine` is that check, to be copied.
"""

import hashlib
import hmac
from collections.abc import Mapping

DELIVERY, EVENT, TIMESTAMP, SIGNATURE = "Eyrie-Delivery", "Eyrie-Event", "Eyrie-Timestamp", "Eyrie-Signature"
_VERSION = "v1="


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """The value of Eyrie-Signature."""
    return _VERSION + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def signed(secret: str, delivery: str, event: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a delivery."""
    return {"Content-Type": "application/json", "User-Agent": "eyrie", DELIVERY: delivery, EVENT: event,
            TIMESTAMP: str(timestamp), SIGNATURE: signature(secret, timestamp, body)}


def is_genuine(secret: str, headers: Mapping[str, str], body: bytes, now: float, tolerance_s: float = 300.0) -> bool:
    """Whether a delivery was signed with this secret, and lately. Header names in any case."""
    found = {name.lower(): value for name, value in headers.items()}
    timestamp, shown = found.get(TIMESTAMP.lower(), ""), found.get(SIGNATURE.lower(), "")
    if not (timestamp.isascii() and timestamp.isdigit()) or abs(now - int(timestamp)) > tolerance_s:
        return False
    return hmac.compare_digest(signature(secret, int(timestamp), body), shown)

"""Signatures of webhook deliveries and their verification by the receiver. Pure.

    Eyrie-Delivery   id of the delivery; the same in every attempt, so that a receiver can ignore repetitions
    Eyrie-Event      the event, for example job.succeeded
    Eyrie-Timestamp  seconds since 1970 when it was sent
    Eyrie-Signature  v1=<hex>, HMAC-SHA256 under the webhook's secret over `<timestamp>.<body>`

The signature covers the timestamp, so that a recorded delivery cannot be replayed an hour later. Receivers compare in
constant time and reject deliveries older than a few minutes; `is_genuine` is that check, for receivers to copy.
"""

import hashlib
import hmac
from collections.abc import Mapping

DELIVERY, EVENT, TIMESTAMP, SIGNATURE = "Eyrie-Delivery", "Eyrie-Event", "Eyrie-Timestamp", "Eyrie-Signature"
_VERSION = "v1="


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """The value of Eyrie-Signature."""
    return _VERSION + hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()


def signed_headers(secret: str, delivery: str, event: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a delivery."""
    return {"Content-Type": "application/json", "User-Agent": "eyrie", DELIVERY: delivery, EVENT: event,
            TIMESTAMP: str(timestamp), SIGNATURE: signature(secret, timestamp, body)}


def is_genuine(secret: str, headers: Mapping[str, str], body: bytes, now: float, tolerance_s: float = 300.0) -> bool:
    """Whether a delivery was signed with this secret within `tolerance_s`. Header names are case-insensitive."""
    found = {name.lower(): value for name, value in headers.items()}
    timestamp, received = found.get(TIMESTAMP.lower(), ""), found.get(SIGNATURE.lower(), "")
    if not (timestamp.isascii() and timestamp.isdigit()) or abs(now - int(timestamp)) > tolerance_s:
        return False
    return hmac.compare_digest(signature(secret, int(timestamp), body), received)

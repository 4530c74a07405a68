"""Rate limits of callers and projects: token buckets.

A bucket has a capacity of ten seconds of its rate and refills continuously. Without Redis the buckets are in memory.
With Redis as broker all API servers share the buckets in it; a server takes the tokens of a tenth of a second at once,
so that few requests wait for Redis. While Redis is unavailable each server uses local buckets instead, so that requests
continue to be served.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from redis import RedisError
from redis.asyncio import Redis

from eyrie_api.errors import Transient

log = logging.getLogger(__name__)

_BURST_S = 10.0
_MAX_BUCKETS = 10_000
_LOT_S, _LOT_KEPT_S = 0.1, 1.0
_AWAY_S = 5.0
_TIMEOUT_S = 0.25

# KEYS: the bucket. ARGV: tokens per second, capacity, tokens wanted. Returns the number of tokens taken and, when it is
# 0, the milliseconds until the next token. Uses the clock of Redis (TIME), since the API servers' clocks differ. Race:
# Redis runs a script atomically, so concurrent servers cannot take the same tokens.
_TAKE = """
local now = redis.call('TIME'); now = now[1] + now[2] / 1e6
local rate, capacity, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local held = redis.call('HMGET', KEYS[1], 'tokens', 'time')
local tokens = math.min(capacity, (tonumber(held[1]) or capacity) + (now - (tonumber(held[2]) or now)) * rate)
local given = math.min(wanted, math.floor(tokens))
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens - given), 'time', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(capacity / rate * 1000) + 1000)
return {given, given > 0 and 0 or math.ceil((1 - tokens) / rate * 1000)}
"""


class RateLimited(Transient):
    """Too many requests."""

    http_status = 429


class Buckets(Protocol):
    async def take(self, name: str, per_minute: int) -> float:
        """Take a token. Returns 0, or the seconds until the next one when the bucket is empty."""


def require(wait_s: float, whose: str, per_minute: int) -> None:
    """Raises RateLimited when `wait_s` is positive."""
    if wait_s > 0:
        raise RateLimited(f"{whose} makes more than {per_minute} requests per minute", "wait, then go on more slowly",
                          max(1.0, wait_s))


class LocalBuckets:
    """Buckets in the memory of this process. `elapsed` is a monotonic clock."""

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._held: dict[str, tuple[float, float]] = {}

    async def take(self, name: str, per_minute: int) -> float:
        rate, capacity = _shape(per_minute)
        now = self._elapsed()
        tokens, then = self._held.get(name, (capacity, now))
        tokens = min(capacity, tokens + (now - then) * rate)
        if len(self._held) >= _MAX_BUCKETS:
            self._held.clear()
        self._held[name] = (tokens - 1 if tokens >= 1 else tokens, now)
        return 0.0 if tokens >= 1 else (1 - tokens) / rate


class SharedBuckets:
    """Buckets in Redis. Belongs to one event loop."""

    def __init__(self, url: str, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._take: Any = self._redis.register_script(_TAKE)
        self._elapsed, self._meanwhile = elapsed, LocalBuckets(elapsed)
        self._lots: dict[str, tuple[int, float]] = {}
        self._away_until = 0.0

    async def take(self, name: str, per_minute: int) -> float:
        now = self._elapsed()
        left, until = self._lots.get(name, (0, 0.0))
        if left > 0 and now < until:
            self._lots[name] = (left - 1, until)
            return 0.0
        if now < self._away_until:
            return await self._meanwhile.take(name, per_minute)
        rate, capacity = _shape(per_minute)
        try:
            taken, wait_ms = await self._take(keys=[f"eyrie-limit:{name}"],
                                              args=[rate, capacity, max(1, int(rate * _LOT_S))])
        except (RedisError, OSError) as error:
            log.warning("Redis does not answer (%s): rate limits are this server's own for now", type(error).__name__)
            self._away_until = now + _AWAY_S
            return await self._meanwhile.take(name, per_minute)
        if len(self._lots) >= _MAX_BUCKETS:
            self._lots.clear()
        self._lots[name] = (int(taken) - 1, now + _LOT_KEPT_S)
        return float(wait_ms) / 1000


def _shape(per_minute: int) -> tuple[float, float]:
    """(tokens per second, capacity)."""
    return per_minute / 60, max(1.0, per_minute / 60 * _BURST_S)

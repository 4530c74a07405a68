"""The broker of Celery: kombu's settings, queue lengths, locks of long tasks, and a workaround for one defect of kombu.

Messages wait in Redis (or, on one machine, in this process's memory). A worker acknowledges a message when its task is
done; Redis delivers the messages of dead workers again after the visibility timeout.

The defect: a worker may hold as many unacknowledged messages as it has children. When Redis becomes unavailable during
a task, the acknowledgement fails, is logged, and the message counts as unacknowledged for ever; with all slots so
taken, the worker fetches nothing more and never notices that Redis is back. (Observed with kombu 5.7 and two children:
idle for good after a two-second restart.) Here a message whose acknowledgement fails is dropped from the worker's
account. It is delivered again later, which chores and shards allow for, and the next request finds the dead connection
and opens another.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis as redis_client
from kombu import Connection
from kombu.exceptions import ChannelError, OperationalError
from kombu.transport import redis, virtual

from eyrie_api.errors import Transient

SHARD_QUEUE = "eyrie-shards"
"""The queue of regeneration shards, for every database: scale workers on `LLEN eyrie-shards`."""

POLLING_INTERVAL_S = 0.05
"""Of kombu's memory transport. A round trip takes 1.0 s with its default, 0.05 s with this."""


class BrokerUnavailable(Transient):
    """The broker is unavailable."""

    exit_code = 69  # EX_UNAVAILABLE


class _ReleasingQoS(redis.QoS):  # type: ignore[misc]
    """Counts a worker's unacknowledged messages; one that cannot be acknowledged is no longer counted."""

    def ack(self, delivery_tag: str) -> None:
        try:
            super().ack(delivery_tag)
        except self.channel.connection_errors:
            virtual.QoS.ack(self, delivery_tag)
            raise

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        try:
            super().reject(delivery_tag, requeue=requeue)
        except self.channel.connection_errors:
            virtual.QoS.ack(self, delivery_tag)
            raise


class _Channel(redis.Channel):  # type: ignore[misc]
    QoS = _ReleasingQoS


class RedisTransport(redis.Transport):  # type: ignore[misc]
    """kombu's Redis transport with the workaround above."""

    Channel = _Channel


def transport_settings(broker_url: str, visibility_timeout_s: float) -> dict[str, Any]:
    """Celery's broker settings. By default kombu looks for messages of dead workers only once in 100 s."""
    settings: dict[str, Any] = {
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # a worker waits for its broker without limit
        "broker_connection_timeout": 4,
    }
    if broker_url.startswith("memory:"):
        return settings | {"broker_transport_options": {"polling_interval": POLLING_INTERVAL_S}}
    if broker_url.startswith(("redis:", "rediss:")):
        settings["broker_transport"] = "eyrie_api.chores.broker:RedisTransport"
    return settings | {"broker_transport_options": {
        "visibility_timeout": visibility_timeout_s, "unacked_restore_throttle": 1,
        "unacked_restore_interval": max(1.0, min(10.0, visibility_timeout_s / 10))}}


def messages_waiting(connection: Connection, queue: str) -> int:
    """Messages waiting in a queue, without those being processed: the figure to scale workers on (in Redis: LLEN).
    Raises BrokerUnavailable."""
    try:
        with connection, connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).message_count)
    except ChannelError:  # nothing has been published to it yet
        return 0
    except (OperationalError, OSError, *connection.connection_errors) as error:
        raise BrokerUnavailable(f"the broker is unavailable: {type(error).__name__}",
                                "check EYRIE_BROKER_URL") from error


class TaskLocks:
    """Locks of long tasks, in Redis next to kombu's own records.

    Redis delivers a message again when it has not been acknowledged within the visibility timeout. A task that may take
    longer extends its lock: the message's time in kombu's index is set to now (`unacked_index`, by delivery tag), and a
    key of ours marks the task as running, so that a second message for it is dropped.

    Race: the key lives for half the visibility timeout, so that it has expired before a dead worker's message is
    delivered again; otherwise that message would be dropped and the task lost.
    """

    def __init__(self, broker_url: str, visibility_timeout_s: float) -> None:
        self._client = redis_client.Redis.from_url(broker_url, socket_timeout=5.0, socket_connect_timeout=5.0)
        self._ttl_ms = int(visibility_timeout_s * 500)

    @property
    def renew_every_s(self) -> float:
        """A quarter of the key's lifetime: two failed renewals do not lose the lock."""
        return self._ttl_ms / 4000

    def take(self, name: str, tag: str) -> bool:
        """Lock `name` for the message `tag`; False while another message holds the lock."""
        with _translating_errors():
            taken = self._client.set(_lock_key(name), tag, px=self._ttl_ms, nx=True)
            return bool(taken) or self._client.get(_lock_key(name)) == tag.encode()

    def renew(self, name: str, tag: str) -> None:
        with _translating_errors():
            self._client.zadd("unacked_index", {tag: time.time()}, xx=True)
            self._client.set(_lock_key(name), tag, px=self._ttl_ms)

    def release(self, name: str) -> None:
        with _translating_errors():
            self._client.delete(_lock_key(name))

    def is_held(self, name: str) -> bool:
        with _translating_errors():
            return bool(self._client.exists(_lock_key(name)))


def _lock_key(name: str) -> str:
    return f"eyrie-held:{name}"


@contextmanager
def _translating_errors() -> Iterator[None]:
    try:
        yield
    except redis_client.RedisError as error:
        raise BrokerUnavailable(f"the broker is unavailable: {type(error).__name__}",
                                "check EYRIE_BROKER_URL") from error

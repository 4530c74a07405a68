"""The broker beneath Celery: what kombu is told about it, how much waits there, who holds what, and one defect mended.

Messages wait in Redis (or, on one machine, in this process's memory). A worker acknowledges one when its work is done;
Redis hands those of dead workers out again after the visibility timeout.

The defect: a worker may hold as many unacknowledged messages as it has hands. When Redis goes away while it works, the
acknowledgement fails, is logged, and the message counts as held for ever; with all hands so taken, the worker asks for
nothing more and never notices that Redis is back. (Seen with kombu 5.7 and two children: idle for good after a
two-second restart.) Here a message whose acknowledgement fails is let go. It is handed out again later, which chores
and shards allow for, and the next request finds the dead connection and opens another.
"""

import re
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
"""Where shards of regeneration wait, whatever database their jobs are in: `LLEN eyrie-shards` is what to scale on."""

POLLING_INTERVAL_S = 0.05
"""Of kombu's memory transport: a round trip takes 1.0 s with its default, 0.05 s with this."""


class BrokerAway(Transient):
    """The broker does not answer."""

    exit_code = 69  # EX_UNAVAILABLE
    reason = "BrokerAway"


class _LettingGo(redis.QoS):  # type: ignore[misc]
    """Counts what this worker holds; what cannot be acknowledged is held no longer."""

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
    QoS = _LettingGo


class RedisTransport(redis.Transport):  # type: ignore[misc]
    """kombu's, with the defect above made good."""

    Channel = _Channel


def transport_settings(broker_url: str, visibility_timeout_s: float) -> dict[str, Any]:
    """Celery's settings about its broker. kombu by default looks for messages of dead workers once in 100 s."""
    settings: dict[str, Any] = {
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # a worker outlasts its broker, however long that is away
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
    """Messages that wait in a queue, those in hand not counted: what workers are scaled on (in Redis: LLEN).

    Raises BrokerAway.
    """
    try:
        with connection, connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).message_count)
    except ChannelError:  # nothing has been put into it yet
        return 0
    except (OperationalError, OSError, *connection.connection_errors) as error:
        raise BrokerAway(f"the broker does not answer: {type(error).__name__}", "check EYRIE_BROKER_URL") from error


def without_password(url: str) -> str:
    """A broker's URL as it may be shown."""
    return re.sub(r"//[^/@]*@", "//", url)


class Holds:
    """Long work in whose hands, told to Redis beside kombu's own account of it.

    Redis hands a message out again when it has not been acknowledged for the visibility timeout. Work that may take
    longer renews its hold: the message's time in kombu's index is set to now (`unacked_index`, by delivery tag), and a
    key of ours says that this piece is being worked on, so that a second message for it is let go. The key lives for
    half the visibility timeout: when a dead worker's message comes back, its key is gone.
    """

    def __init__(self, broker_url: str, visibility_timeout_s: float) -> None:
        self._client = redis_client.Redis.from_url(broker_url, socket_timeout=5.0, socket_connect_timeout=5.0)
        self._ttl_ms = int(visibility_timeout_s * 500)

    @property
    def renew_every_s(self) -> float:
        """Often enough: four times in the life of a key."""
        return self._ttl_ms / 4000

    def take(self, name: str, tag: str) -> bool:
        """Begin to work on `name` under the message `tag`; False when another message's worker is at it."""
        with _answering():
            taken = self._client.set(_held(name), tag, px=self._ttl_ms, nx=True)
            return bool(taken) or self._client.get(_held(name)) == tag.encode()

    def renew(self, name: str, tag: str) -> None:
        """Still at it."""
        with _answering():
            self._client.zadd("unacked_index", {tag: time.time()}, xx=True)
            self._client.set(_held(name), tag, px=self._ttl_ms)

    def release(self, name: str) -> None:
        """Done, or given up."""
        with _answering():
            self._client.delete(_held(name))

    def is_held(self, name: str) -> bool:
        """Whether somebody is at it."""
        with _answering():
            return bool(self._client.exists(_held(name)))


def _held(name: str) -> str:
    return f"eyrie-held:{name}"


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except redis_client.RedisError as error:
        raise BrokerAway(f"the broker does not answer: {type(error).__name__}", "check EYRIE_BROKER_URL") from error

"""The broker beneath Celery: what kombu is told about it, how much waits there, and one defect of its made good.

Messages wait in Redis (or, on one machine, in this process's memory). A worker acknowledges one when its work is done;
Redis hands those of dead workers out again after the visibility timeout.

The defect: a worker may hold as many unacknowledged messages as it has hands. When Redis goes away while it works, the
acknowledgement fails, is logged, and the message counts as held for ever; with all hands so taken, the worker asks for
nothing more and never notices that Redis is back. (Seen with kombu 5.7 and two children: idle for good after a
two-second restart.) Here a message whose acknowledgement fails is let go. It is handed out again later, which chores
and shards allow for, and the next request finds the dead connection and opens another.
"""

import re
from typing import Any

from kombu import Connection
from kombu.exceptions import ChannelError, OperationalError
from kombu.transport import redis, virtual

from eyrie_api.errors import Transient

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
    if broker_url.startswith("redis:"):
        settings["broker_transport"] = "eyrie_api.broker:RedisTransport"
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

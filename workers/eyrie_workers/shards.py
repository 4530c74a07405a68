"""Shards of regeneration as Celery tasks. The other user of Celery is `eyrie_api.chores`.

    python -m eyrie_workers.shards --concurrency 4     a prefork worker; scale workers with the length of the queue

`regeneration.sharded` does the work; this module delivers shards to workers. One shard may take longer than the
visibility timeout, so its worker renews a lock meanwhile (`eyrie_api.chores.broker.TaskLocks`): the shard of a dead
worker is delivered again within that time, that of a live worker is not. A worker needs
EYRIE_BROKER_URL, EYRIE_ARTIFACTS_* and the key that `regenerate.api_key_env` names; no database, no GPU, no torch.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from eyrie_api.artifacts import digest_model
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.chores.broker import SHARD_QUEUE, BrokerUnavailable, TaskLocks, messages_waiting, transport_settings
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.errors import EyrieError, InvalidInput, Transient, report_error
from eyrie_workers.regeneration.sharded import ShardedClient, ShardingConfig, ShardMessage, answer_shard

TASK = "eyrie.regenerate_shard"
_MAX_RETRY_DELAY_S = 60.0


def broker_url() -> str:
    """The Redis URL in EYRIE_BROKER_URL. Raises InvalidInput when it is not set, or names an in-memory broker."""
    url = os.environ.get("EYRIE_BROKER_URL", "")
    if not url or url.startswith("memory:"):
        raise InvalidInput("regeneration in shards needs a broker that several processes share",
                           "set EYRIE_BROKER_URL to the cluster's Redis, or unset EYRIE_SHARD_ROWS")
    return url


def make_app(url: str, sharding: ShardingConfig) -> Celery:
    app = Celery("eyrie-shards", broker=url, set_as_current=False)
    app.conf.update({
        **transport_settings(url, sharding.shard_visibility_timeout_s),
        "task_default_queue": SHARD_QUEUE, "task_serializer": "json", "accept_content": ["json"],
        "task_acks_late": True, "task_reject_on_worker_lost": True, "task_ignore_result": True,
        "worker_prefetch_multiplier": 1, "task_publish_retry": False, "worker_hijack_root_logger": False,
        "worker_enable_remote_control": False, "worker_cancel_long_running_tasks_on_connection_loss": False,
    })
    locks = TaskLocks(url, sharding.shard_visibility_timeout_s)
    cache = Path(tempfile.gettempdir()) / f"eyrie-shards-{os.getuid()}"

    @app.task(name=TASK, bind=True, shared=False, max_retries=None)
    def regenerate_shard(task: Any, text: str) -> None:
        order = ShardMessage.model_validate_json(text)
        tag = str(task.request.properties["delivery_tag"])
        name = digest_model(order)  # of the shard's lock, unique among all jobs
        if not locks.take(name, tag):
            return
        try:
            store = open_store(order.store_url, StoreOptions.from_env())
            answer_shard(order, store, cache / str(os.getpid()), _renewing(locks, name, tag))
        except Transient as trouble:
            raise task.retry(exc=trouble, countdown=min(trouble.after_s, _MAX_RETRY_DELAY_S)) from trouble
        finally:
            with contextlib.suppress(BrokerUnavailable):  # the lock expires by itself
                locks.release(name)

    return app


def _renewing(locks: TaskLocks, name: str, tag: str) -> Callable[[], None]:
    """A pause function that renews the lock when a renewal is due."""
    due = time.monotonic() + locks.renew_every_s

    def pause() -> None:
        nonlocal due
        if time.monotonic() >= due:
            # Race: an unrenewed lock expires, and another worker answers the same shard. The second one to finish fails
            # its conditional write.
            with contextlib.suppress(BrokerUnavailable):
                locks.renew(name, tag)
            due = time.monotonic() + locks.renew_every_s

    return pause


class CeleryShards:
    """`ShardQueue` over Celery."""

    def __init__(self, url: str, sharding: ShardingConfig) -> None:
        self._app = make_app(url, sharding)
        self._locks = TaskLocks(url, sharding.shard_visibility_timeout_s)

    def send(self, order: ShardMessage) -> None:
        try:
            self._app.send_task(TASK, args=[order.model_dump_json()])
        except OperationalError as error:
            raise BrokerUnavailable(f"the broker is unavailable: {type(error).__name__}",
                                    "check EYRIE_BROKER_URL") from error

    def length(self) -> int:
        return messages_waiting(self._app.connection_for_read(connect_timeout=2), SHARD_QUEUE)

    def is_held(self, order: ShardMessage) -> bool:
        return self._locks.is_held(digest_model(order))


def sharded_client(sharding: ShardingConfig, spec: RegenerateStage, context: int, target_dir: Path,
                   warn: Callable[[str, str], None]) -> ShardedClient:
    """The client of a stage that regenerates in shards. Raises InvalidInput when broker or store are not configured."""
    store = open_store()
    order = ShardMessage(store_url=store.url, prefix=f"jobs/{spec.job_id}/regenerate-shards", shard="",
                       target=spec.target, regenerate=spec.regenerate, context=context, reads=spec.reads)
    return ShardedClient(order=order, store=store, queue=CeleryShards(broker_url(), sharding), sharding=sharding,
                         tokenizer_dir=target_dir, warn=warn,
                         resend_after_s=2 * sharding.shard_visibility_timeout_s)


def main(argv: list[str] | None = None) -> int:
    """Answer shards until SIGTERM or SIGINT; running shards are finished."""
    parser = argparse.ArgumentParser(description="Answers shards of regeneration from Redis (EYRIE_BROKER_URL).")
    parser.add_argument("--concurrency", type=int, default=2, help="shards at once, each with many requests in flight")
    arguments = parser.parse_args(argv)
    try:
        app = make_app(broker_url(), ShardingConfig.from_env())
    except EyrieError as error:
        return report_error(error)
    app.worker_main([
        "worker", "--pool", "prefork", "--concurrency", str(arguments.concurrency), "--loglevel", "WARNING",
        "--hostname", f"eyrie-shards-{os.getpid()}@%h", "--without-heartbeat", "--without-mingle", "--without-gossip"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

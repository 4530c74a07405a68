"""Events of the cluster through kopf. The only module that imports `kopf`.

kopf lists, watches, reconnects, lists again when needed, and delivers the events of an object in order. Only its
`on.event` handlers are used, which pass objects on. Its create/update/resume handlers are edge-triggered: they detect
edges with an annotation that repeats the whole spec, and its timers with a finalizer, which costs two writes per object
at first sight and one more per change. For a thousand objects that would be a burst of writes, and this controller is
level-triggered. Timers, resync and retries are in `workqueue`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from eyrie_api.v1alpha1.resources import GROUP, VERSION
from eyrie_operator.cluster.controller import Kind

EventHandler = Callable[[Kind, str | None, dict[str, Any]], None]
_KINDS: tuple[tuple[str, Kind], ...] = (("drafterjobs", "DrafterJob"), ("draftendpoints", "DraftEndpoint"))


async def watch(handle_event: EventHandler, stopping: asyncio.Event, *, namespaces: Sequence[str] = (),
                ready: asyncio.Event | None = None) -> None:
    """Pass on every object of ours, initially and at each change, until `stopping`. No namespaces means all."""
    registry = kopf.OperatorRegistry()
    for plural, kind in _KINDS:
        kopf.on.event(GROUP, VERSION, plural, registry=registry, id=plural)(_forwarding(handle_event, kind))
    kopf.on.login(registry=registry, id="login")(_log_in)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # kopf would post its log lines as Events
    settings.peering.standalone = True  # leader election is in `leases`
    settings.scanning.disabled = True  # no right to list CustomResourceDefinitions and namespaces is needed
    settings.watching.server_timeout = 300
    settings.persistence.finalizer = f"{GROUP}/kopf"  # on.event sets none; named in case kopf does
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    await kopf.operator(registry=registry, settings=settings, standalone=True, stop_flag=stopping, ready_flag=ready,
                        clusterwide=not namespaces, namespaces=tuple(namespaces))


def _forwarding(handle_event: EventHandler, kind: Kind) -> Callable[..., Any]:
    async def forward(event: Any, **_other: Any) -> None:
        handle_event(kind, event["type"], dict(event["object"]))

    return forward


def _log_in(**known: Any) -> Any:
    return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

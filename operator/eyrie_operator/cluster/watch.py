"""kopf: what happens in the cluster, heard. The one door to `kopf`.

kopf lists, watches, reconnects and falls back to listing again, and hands over each event of an object in order. Its
`on.event` handlers are all that is used, and they only pass objects on. Its create/update/resume handlers are
edge-triggered: they find edges by an annotation that repeats the whole spec, its timers by a finalizer of theirs, which
is two writes per object at first sight and one more at each change. A thousand objects would be a storm, and we are
level-triggered anyway. Timers, resync and retries are `workqueue`'s.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from eyrie_api.v1alpha1.resources import GROUP, VERSION
from eyrie_operator.cluster.controller import Kind

Hear = Callable[[Kind, str | None, dict[str, Any]], None]
_KINDS: tuple[tuple[str, Kind], ...] = (("drafterjobs", "DrafterJob"), ("draftendpoints", "DraftEndpoint"))


async def watch(hear: Hear, stopping: asyncio.Event, *, namespaces: Sequence[str] = (),
                ready: asyncio.Event | None = None) -> None:
    """Pass on every object of ours, now and at each change, until told to stop. All namespaces when none is named."""
    registry = kopf.OperatorRegistry()
    for plural, kind in _KINDS:
        kopf.on.event(GROUP, VERSION, plural, registry=registry, id=plural)(_passing_on(hear, kind))
    kopf.on.login(registry=registry, id="login")(_log_in)
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # it would post its own log lines as Events
    settings.peering.standalone = True  # the lease decides who acts
    settings.scanning.disabled = True  # no right to list CustomResourceDefinitions and namespaces is needed
    settings.watching.server_timeout = 300
    settings.persistence.finalizer = f"{GROUP}/kopf"  # never set by on.event; ours if it ever were
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    await kopf.operator(registry=registry, settings=settings, standalone=True, stop_flag=stopping, ready_flag=ready,
                        clusterwide=not namespaces, namespaces=tuple(namespaces))


def _passing_on(hear: Hear, kind: Kind) -> Callable[..., Any]:
    async def heard(event: Any, **_other: Any) -> None:
        hear(kind, event["type"], dict(event["object"]))

    return heard


def _log_in(**known: Any) -> Any:
    return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

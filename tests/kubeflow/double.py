"""A test double of the Kubeflow Pipelines backend: its REST API v2beta1 before Jobs that really run.

    python -m tests.kubeflow.double --namespace NS --port 8888 [--host 0.0.0.0] [--pod-patch FILE]

It is no Kubeflow. It speaks to the real client (`kfp_server_api`, `kfp.Client`) and executes the compiled pipeline that
a run carries, one Kubernetes Job per task (and one more each time a task is tried again), in one namespace; it asks for
a kubeconfig or a service account and for nothing else. What it keeps lies in ConfigMaps there: kill it, start it again,
and it goes on. One at a time: two would write over each other.

    interpreter   the compiled pipeline: which task may run, with which inputs      pure
    jobs          a task's Job, and the launcher's part in its pod                  pure
    runs          a run: what is kept of it, what happens next                      pure
    cluster       Kubernetes                                                        acts
    backend       runs and experiments, and the loop that drives them               acts
    double        HTTP, and this program

What the real backend does otherwise: it is multi-user if set up so (this is not: a namespace given must be its own, or
none); it keeps pipelines, versions and recurring runs; it has an object store (see `jobs`) and caches tasks; Argo
makes pods and no Jobs; a retried run is a Workflow made again. What this double does not read of a pipeline it refuses
when the run is made.

Artifacts are listed by their ids in a task's `inputs` and `outputs`. The real backend keeps them in ML Metadata, which
its pages read by gRPC; here `GET /artifacts/{id}` answers with name, type, URI and metadata.

The JSON is the API's: snake_case names, enums by name, times in RFC 3339, errors as gRPC's gateway writes them.
"""

import argparse
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.kubeflow.backend import ALREADY_EXISTS, FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, Backend, Wrong
from tests.kubeflow.cluster import Namespace
from tests.kubeflow.interpreter import Artifacts
from tests.kubeflow.runs import Change, Run, Runtime, Task

HTTP_STATUS = {INVALID_ARGUMENT: 400, FAILED_PRECONDITION: 400, NOT_FOUND: 404, ALREADY_EXISTS: 409}
OPERATIONS = {1: "EQUALS", 2: "NOT_EQUALS", 8: "IN", 9: "IS_SUBSTRING"}
"""Of a filter's predicate, by protobuf's numbers: `kfp.Client` sends those."""
PAGE_SIZE = 20


def application(backend: Backend, namespace: str) -> Starlette:
    """The API."""

    def answered(answer: Callable[[Request, Mapping[str, Any]], Any], *methods: str, path: str) -> Route:
        async def endpoint(request: Request) -> JSONResponse:
            body = await request.body()
            try:
                asked = json.loads(body) if body else {}
            except ValueError as error:
                raise Wrong(INVALID_ARGUMENT, f"the request's body is no JSON: {error}") from error
            if not isinstance(asked, dict):
                raise Wrong(INVALID_ARGUMENT, "the request's body is no JSON object")
            return JSONResponse(await run_in_threadpool(answer, request, asked))

        return Route(f"/apis/v2beta1{path}", endpoint, methods=list(methods))

    def of_here(asked: str | None) -> None:
        if asked not in (None, "", namespace):
            raise Wrong(INVALID_ARGUMENT, f"namespace {asked!r} is not this backend's: {namespace!r}")

    def create_experiment(request: Request, asked: Mapping[str, Any]) -> Any:
        of_here(asked.get("namespace"))
        return backend.create_experiment(asked.get("display_name", ""), asked.get("description", ""))

    def list_experiments(request: Request, asked: Mapping[str, Any]) -> Any:
        of_here(request.query_params.get("namespace"))
        return _page(request, "experiments", backend.experiments())

    def list_runs(request: Request, asked: Mapping[str, Any]) -> Any:
        of_here(request.query_params.get("namespace"))
        experiment = request.query_params.get("experiment_id")
        return _page(request, "runs", [rendered(run) for run in backend.runs()
                                       if experiment in (None, "", run.experiment_id)])

    def run_verb(request: Request, asked: Mapping[str, Any]) -> Any:
        verbs: dict[str, Callable[[str], None]] = {
            "terminate": backend.terminate, "retry": backend.retry,
            "archive": lambda run_id: backend.archive(run_id, True),
            "unarchive": lambda run_id: backend.archive(run_id, False)}
        return _acted(request.path_params["named"], verbs)

    def experiment_verb(request: Request, asked: Mapping[str, Any]) -> Any:
        return _acted(request.path_params["named"], {
            "archive": lambda one: backend.store_experiment(one, "ARCHIVED"),
            "unarchive": lambda one: backend.store_experiment(one, "AVAILABLE")})

    def delete_run(request: Request, asked: Mapping[str, Any]) -> Any:
        backend.delete(request.path_params["named"])
        return {}

    def delete_experiment(request: Request, asked: Mapping[str, Any]) -> Any:
        backend.delete_experiment(request.path_params["named"])
        return {}

    async def artifact(request: Request) -> JSONResponse:
        found = await run_in_threadpool(_find_artifact, backend, request.path_params["named"])
        return JSONResponse(found)

    return Starlette(routes=[
        answered(lambda *_: {"multi_user": False, "pipeline_store": "database"}, "GET", path="/healthz"),
        answered(create_experiment, "POST", path="/experiments"),
        answered(list_experiments, "GET", path="/experiments"),
        answered(lambda request, _: backend.experiment(request.path_params["named"]), "GET",
                 path="/experiments/{named}"),
        answered(delete_experiment, "DELETE", path="/experiments/{named}"),
        answered(experiment_verb, "POST", path="/experiments/{named}"),
        answered(lambda _, asked: rendered(backend.create_run(asked)), "POST", path="/runs"),
        answered(list_runs, "GET", path="/runs"),
        answered(lambda request, _: rendered(backend.run(request.path_params["named"])), "GET", path="/runs/{named}"),
        answered(delete_run, "DELETE", path="/runs/{named}"),
        Route("/artifacts/{named}", artifact),
        answered(run_verb, "POST", path="/runs/{named}"),
    ], exception_handlers={Wrong: _error})


def _error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Wrong)
    status = {"@type": "type.googleapis.com/google.rpc.Status", "code": error.code, "message": str(error)}
    return JSONResponse({"error": str(error), "code": error.code, "message": str(error), "details": [status]},
                        status_code=HTTP_STATUS[error.code])


def _acted(named: str, verbs: Mapping[str, Callable[[str], None]]) -> Any:
    """`<id>:<verb>`, as Google's APIs write a verb."""
    one, _, verb = named.rpartition(":")
    if verb not in verbs:
        raise Wrong(NOT_FOUND, f"no such thing to do: {named!r}")
    verbs[verb](one)
    return {}


def _find_artifact(backend: Backend, artifact_id: str) -> dict[str, Any]:
    for run in backend.runs():
        for task in run.tasks.values():
            for listed in task.artifacts.values():
                for one in listed:
                    if _artifact_id(one) == artifact_id:
                        return one
    raise Wrong(NOT_FOUND, f"artifact {artifact_id} not found")


def _artifact_id(artifact: Mapping[str, Any]) -> str:
    """The URI that a task was handed is its own; one that its component set may be another's too."""
    return hashlib.sha256(json.dumps(artifact, sort_keys=True).encode()).hexdigest()[:16]


def _listed(artifacts: Artifacts) -> dict[str, Any]:
    return {name: {"artifact_ids": [_artifact_id(one) for one in listed]} for name, listed in artifacts.items()}


def rendered(run: Run) -> dict[str, Any]:
    """A run in the API's words."""
    shown: dict[str, Any] = {
        "experiment_id": run.experiment_id, "run_id": run.run_id, "display_name": run.display_name,
        "storage_state": "ARCHIVED" if run.archived else "AVAILABLE", "pipeline_spec": run.pipeline_spec,
        "runtime_config": {"parameters": run.parameters, "pipeline_root": run.pipeline_root},
        "created_at": _time(run.created_at), "scheduled_at": _time(run.created_at),
        # The zero time, as the real backend answers for a run that has not ended.
        "finished_at": _time(run.finished_at) or "1970-01-01T00:00:00Z",
        "state": run.state, "state_history": [_change(one) for one in run.history],
        "run_details": {"task_details": [*_root(run), *(_task(run, task) for task in run.tasks.values())]},
    }
    if run.description:
        shown["description"] = run.description
    if run.service_account:
        shown["service_account"] = run.service_account
    if run.error:
        shown["error"] = {"code": 2, "message": run.error}
    return shown


def _root(run: Run) -> list[dict[str, Any]]:
    """The task that stands for the whole, as the real backend lists it."""
    root = {"run_id": run.run_id, "task_id": run.run_id, "display_name": "root", "state": run.state,
            "create_time": _time(run.created_at), "start_time": _time(run.created_at),
            "state_history": [_change(one) for one in run.history]}
    return [root if run.finished_at is None else root | {"end_time": _time(run.finished_at)}]


def _task(run: Run, task: Task) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "run_id": run.run_id, "task_id": f"{run.run_id}-{task.path}".replace("/", "."),
        "display_name": task.path, "state": task.state, "parent_task_id": run.run_id,
        "state_history": [_change(one) for one in task.history]}
    given = task.handed.get("inputs", {}).get("artifacts", {})
    if given:
        shown["inputs"] = _listed({name: one["artifacts"] for name, one in given.items()})
    if task.artifacts:
        shown["outputs"] = _listed(task.artifacts)
    if task.attempts:
        first, latest = task.attempts[0], task.attempts[-1]
        shown |= {"create_time": _time(first.created), "start_time": _time(first.started or first.created),
                  "pod_name": latest.pod, "child_tasks": [{"pod_name": one.pod} for one in task.attempts],
                  "executor_detail": {"main_job": latest.job,
                                      "failed_main_jobs": [one.job for one in task.attempts if one.problem]}}
        if task.state.ended:
            shown["end_time"] = _time(latest.ended or task.history[-1].update_time)
    if task.error and task.state is Runtime.FAILED:
        shown["error"] = {"code": 2, "message": task.error}
    return shown


def _change(one: Change) -> dict[str, Any]:
    return {"update_time": _time(one.update_time), "state": one.state}


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _page(request: Request, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One page of what matches, in the order asked for."""
    asked = request.query_params
    try:
        predicates = json.loads(asked.get("filter") or "{}").get("predicates") or []
        rows = [row for row in rows if all(_matches(row, one) for one in predicates)]
        start, size = int(asked.get("page_token") or 0), int(asked.get("page_size") or 0) or PAGE_SIZE
    except (ValueError, AttributeError) as error:
        raise Wrong(INVALID_ARGUMENT, f"filter, page_token or page_size cannot be read: {error}") from error
    field, _, direction = (asked.get("sort_by") or "created_at").partition(" ")
    field = {"name": "display_name"}.get(field, field)
    if any(field not in row for row in rows):
        raise Wrong(INVALID_ARGUMENT, f"sort_by: {field!r} is not a field of {kind}")
    rows = sorted(rows, key=lambda row: str(row[field]), reverse=direction.strip().lower() == "desc")
    page: dict[str, Any] = {kind: rows[start:start + size], "total_size": len(rows)}
    if start + size < len(rows):
        page["next_page_token"] = str(start + size)
    return page


def _matches(row: Mapping[str, Any], predicate: Mapping[str, Any]) -> bool:
    operation = OPERATIONS.get(predicate.get("operation", 0), predicate.get("operation"))
    key = {"name": "display_name", "id": "run_id" if "run_id" in row else "experiment_id"}.get(
        predicate["key"], predicate["key"]) if "key" in predicate else ""
    if key not in row:
        raise Wrong(INVALID_ARGUMENT, f"filter: {key!r} is not a field one can ask for")
    value = str(row[key])
    wanted = predicate.get("string_value", predicate.get("stringValue"))
    if operation == "IN":
        several = predicate.get("string_values", predicate.get("stringValues")) or {}
        return value in several.get("values", [])
    if wanted is None or operation not in OPERATIONS.values():
        raise Wrong(INVALID_ARGUMENT, f"filter: this double of the backend does not read {dict(predicate)}")
    found: dict[str, bool] = {"EQUALS": value == wanted, "NOT_EQUALS": value != wanted,
                              "IS_SUBSTRING": wanted.lower() in value.lower()}
    return found[str(operation)]


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A test double of the Kubeflow Pipelines backend. Not for real work.")
    parser.add_argument("--namespace", required=True, help="where Jobs run and runs are kept")
    parser.add_argument("--port", type=int, default=8888)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--every", type=float, default=0.5, metavar="SECONDS", help="between looks at the Jobs")
    parser.add_argument("--pod-patch", type=Path, metavar="FILE",
                        help="YAML {metadata, spec, container} laid under every pod: for a test cluster's own needs")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    patch = yaml.safe_load(given.pod_patch.read_text(encoding="utf-8")) if given.pod_patch else {}
    backend = Backend(Namespace(given.namespace), patch)
    stop = threading.Event()
    driver = threading.Thread(target=backend.drive, args=(stop, given.every), name="drive", daemon=True)
    driver.start()
    try:
        uvicorn.run(application(backend, given.namespace), host=given.host, port=given.port, log_level="warning")
    finally:
        stop.set()
        driver.join(timeout=10)


if __name__ == "__main__":
    main()

"""The double's inside: runs and experiments, and the loop that drives every run that has not ended.

One process, one lock, everything written to the cluster before it is answered or acted on. A double that starts reads
the runs that are kept and goes on with them.
"""

import json
import logging
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.kubeflow.cluster import Namespace
from tests.kubeflow.interpreter import Pipeline, Refused, arguments_of, in_order, refuse_what_is_not_read
from tests.kubeflow.jobs import Found, job_of, refuse_settings_not_read
from tests.kubeflow.runs import Run, Runtime, Start, advanced, begun, refused, retried

log = logging.getLogger("kubeflow-double")

DEFAULT_EXPERIMENT = "Default"
"""The experiment of runs that name none, as in the real backend."""


class Wrong(Exception):
    """A request that is answered with an error: its gRPC code, and what is wrong."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION = 3, 5, 6, 9


class Backend:
    """Runs and experiments of one namespace."""

    def __init__(self, namespace: Namespace, pod_patch: Mapping[str, Any]) -> None:
        self._cluster = namespace
        self._pod_patch = pod_patch
        self._lock = threading.RLock()
        self._runs = namespace.runs()
        self._experiments = namespace.experiments()
        if not any(one["display_name"] == DEFAULT_EXPERIMENT for one in self._experiments.values()):
            self.create_experiment(DEFAULT_EXPERIMENT, "All runs that name no experiment")

    # Experiments

    def create_experiment(self, name: str, description: str) -> dict[str, Any]:
        if not name:
            raise Wrong(INVALID_ARGUMENT, "display_name is required")
        with self._lock:
            if any(one["display_name"] == name for one in self._experiments.values()):
                raise Wrong(ALREADY_EXISTS, f"Already exist error: The experiment {name} already exists")
            made = {"experiment_id": str(uuid.uuid4()), "display_name": name, "description": description,
                    "created_at": _now().isoformat(), "storage_state": "AVAILABLE"}
            self._cluster.keep_experiment(made)
            self._experiments[made["experiment_id"]] = made
            return made

    def experiments(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._experiments.values())

    def experiment(self, experiment_id: str) -> dict[str, Any]:
        with self._lock:
            if experiment_id not in self._experiments:
                raise Wrong(NOT_FOUND, f"Experiment {experiment_id} not found")
            return self._experiments[experiment_id]

    def store_experiment(self, experiment_id: str, storage_state: str) -> None:
        """Archive it, or take it from the archive."""
        with self._lock:
            changed = {**self.experiment(experiment_id), "storage_state": storage_state}
            self._cluster.keep_experiment(changed)
            self._experiments[experiment_id] = changed

    def delete_experiment(self, experiment_id: str) -> None:
        with self._lock:
            self.experiment(experiment_id)
            self._cluster.forget_experiment(experiment_id)
            del self._experiments[experiment_id]

    # Runs

    def create_run(self, asked: Mapping[str, Any]) -> Run:
        """Take a run in. Anything the double could not run as the real backend does is refused here."""
        if not asked.get("display_name"):
            raise Wrong(INVALID_ARGUMENT, "display_name is required")
        if not isinstance(asked.get("pipeline_spec"), Mapping):
            raise Wrong(INVALID_ARGUMENT, "pipeline_spec is required: this double of the backend keeps no pipelines")
        runtime = asked.get("runtime_config") or {}
        try:
            pipeline = Pipeline.of(asked["pipeline_spec"])
            refuse_what_is_not_read(pipeline)
            refuse_settings_not_read(pipeline)
            in_order(pipeline.spec["root"]["dag"].get("tasks", {}))
            arguments = arguments_of(pipeline, runtime.get("parameters") or {})
        except Refused as error:
            raise Wrong(INVALID_ARGUMENT, str(error)) from error
        with self._lock:
            default = next(key for key, one in self._experiments.items() if one["display_name"] == DEFAULT_EXPERIMENT)
            experiment_id = asked.get("experiment_id") or default
            self.experiment(experiment_id)
            run = Run(run_id=str(uuid.uuid4()), display_name=asked["display_name"], experiment_id=experiment_id,
                      description=asked.get("description") or "", service_account=asked.get("service_account") or "",
                      pipeline_root=runtime.get("pipeline_root") or "", pipeline_spec=dict(asked["pipeline_spec"]),
                      parameters=dict(runtime.get("parameters") or {}), arguments=arguments, created_at=_now())
            run.becomes(Runtime.PENDING, _now())
            self._keep(run)
            return run

    def runs(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def run(self, run_id: str) -> Run:
        with self._lock:
            if run_id not in self._runs:
                raise Wrong(NOT_FOUND, f"Run {run_id} not found")
            return self._runs[run_id]

    def terminate(self, run_id: str) -> None:
        with self._lock:
            run = self.run(run_id).model_copy(deep=True)
            if run.state.ended or run.state is Runtime.CANCELING:
                raise Wrong(INVALID_ARGUMENT, f"Failed to terminate run {run_id}: it is {run.state}")
            run.becomes(Runtime.CANCELING, _now())
            self._keep(run)

    def retry(self, run_id: str) -> None:
        with self._lock:
            run = self.run(run_id)
            if run.state is not Runtime.FAILED:
                raise Wrong(INVALID_ARGUMENT, f"Failed to retry run {run_id}: it is {run.state}, it has not failed")
            self._keep(retried(run, _now()))

    def archive(self, run_id: str, archived: bool) -> None:
        with self._lock:
            self._keep(self.run(run_id).model_copy(update={"archived": archived}))

    def delete(self, run_id: str) -> None:
        with self._lock:
            self.run(run_id)
            self._cluster.forget_run(run_id)
            del self._runs[run_id]

    # The loop

    def drive(self, stop: threading.Event, every_s: float) -> None:
        """Carry every run on until `stop`."""
        while not stop.wait(every_s):
            try:
                self.step()
            except (ApiException, HTTPError, OSError) as error:
                log.warning("the cluster did not answer, will try again: %s", error)

    def step(self) -> None:
        """Look once at everything that runs, and do what comes next."""
        with self._lock:
            active = [run for run in self._runs.values() if not run.state.ended]
            if not active:
                return
            found = self._cluster.jobs()
            for run in active:
                try:
                    self._carry_on(run, found.get(run.run_id, {}))
                except (Refused, ValueError, KeyError, TypeError) as error:
                    # What was put out is not what the pipeline goes on with: a loop item without the field, say.
                    log.exception("run %s cannot go on", run.run_id)
                    failed = run.model_copy(deep=True, update={"error": f"cannot go on: {error!r}"})
                    failed.becomes(Runtime.FAILED, _now())
                    self._keep(failed)

    def _carry_on(self, run: Run, found: Mapping[str, Found]) -> None:
        pipeline = Pipeline.of(run.pipeline_spec)
        after, starting, deleting = advanced(run, pipeline, found, _now())
        for name in deleting:
            self._cluster.delete_job(name)
        for start in starting:
            self._start(after, pipeline, start)
        if after != run:
            if after.state is not run.state:
                log.info("run %s (%s) is %s %s", run.run_id, run.display_name, after.state, after.error)
            self._keep(after)

    def _start(self, run: Run, pipeline: Pipeline, start: Start) -> None:
        node = start.node
        try:
            job = job_of(pipeline, node, run_id=run.run_id, attempt=start.attempt, within_s=start.within_s,
                         namespace=self._cluster.name, service_account=run.service_account,
                         pipeline_root=run.pipeline_root,
                         owner=self._cluster.owner(run.run_id), patch=self._pod_patch)
            self._cluster.make_job(job)
        except Refused as error:
            refused(run, node, str(error), _now())
        except ApiException as error:
            if error.status not in (400, 403, 422):
                raise
            said = json.loads(error.body or "{}").get("message", error.reason)
            refused(run, node, f"the cluster refused its Job: {said}", _now())
        else:
            log.info("run %s: task %s starts as Job %s", run.run_id, node.path, job["metadata"]["name"])
            begun(run, pipeline, node, _now())

    def _keep(self, run: Run) -> None:
        self._cluster.keep_run(run)
        self._runs[run.run_id] = run


def _now() -> datetime:
    return datetime.now(UTC)

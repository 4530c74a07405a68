"""The runner of a cluster: a run is a run of Kubeflow Pipelines, observed through its API and the job's work area.

Run `<job id>-<attempt>.<n>` is the n-th start of an attempt. Runs are found by name, so that no state is kept between
two observations but the start from which deaths are counted (`run/counting.json`): a run that got further than those
before it restarts the count, as on one machine. `start` observes first and creates a run only when the attempt has
none that is alive: a run whose creation succeeded but whose response was lost is found by the next call. The lease of a
job prevents two drivers from creating runs concurrently.

    PENDING RUNNING PAUSED CANCELING         running
    these, and run/failure.json exists       failed, with leftovers: the driver then stops the run
    SUCCEEDED                                succeeded
    FAILED, and run/failure.json exists      failed, with the stage's own reason, message and hint
    FAILED, and it was CANCELING before      failed: terminated in Kubeflow (the job's own cancel is handled before)
    CANCELED                                 the same
    FAILED otherwise                         gone: its pods exhausted their retries; failed the third time without
                                             progress
    SKIPPED, or not found                    gone

A stage's failure is permanent (`run/failure.json`), but Kubeflow would restart the task with growing pauses, to fail
each time, while other tasks continue. So the failure counts while the run is still alive. The output of other tasks is
kept, and a retry of the job resumes from it.

The pipeline is compiled for each run with every task placed (`placement`), and is sent inline. kfp is imported only
then.

`KfpApi` is the part of the Kubeflow Pipelines API that runs need: v2beta1 by kfp's generated client, which does not
import kfp.

    experiments  found by display name, or created
    runs         created with the pipeline inline, found by display name, read, terminated

KFP has no idempotency key. The name of a run serves as one: callers search for the name before they create a run.
Temporary errors (no response, 429, 5xx) raise `KubeflowUnavailable`; others carry a hint. The bearer token is read for
each request, since a projected token is rotated; it never appears in a message.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import kfp_server_api
import urllib3

from eyrie_api.artifacts import MANIFEST, code_version, digest_model, write_atomically, write_model
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import STAGES, StageName
from eyrie_api.errors import ArtifactMissing, InvalidInput, Permanent, Transient
from eyrie_pipelines.run_records import FAILURE_FILE, RUN_DIR, read_failure, read_record, work_done
from eyrie_pipelines.runner import JOB_FILE, JobFile, ObservedRun, RunFailed, Runner, RunState
from eyrie_pipelines.stage_specs import stage_keys
from eyrie_pipelines.work_area import RUN_FAILURE
from eyrie_workers.catalog import stage_dir

_STATES: dict[str, RunState] = {
    "PENDING": "running", "RUNNING": "running", "PAUSED": "running", "CANCELING": "running",
    "RUNTIME_STATE_UNSPECIFIED": "running", "SUCCEEDED": "succeeded", "FAILED": "failed", "CANCELED": "failed",
    "SKIPPED": "gone",
}
_UNEXPLAINED_FAILURES = 3
"""Starts of an attempt without progress after which a failed run without a stage failure counts as failed."""

_COUNTING = f"{RUN_DIR}/counting.json"


class Counting(Frozen):
    """`run/counting.json`: from which start of an attempt deaths are counted."""

    attempt: int
    first: int = 1
    work: tuple[int, float] = (0, 0.0)
    """The stages' work when that start was made (`work_done`)."""


class KubeflowRunner(Runner):
    """Runs of one installation, which do not depend on the control plane. `store` is the work area; None where job
    directories lie on a shared volume."""

    def __init__(self, profile: ClusterProfile, home: Path, store: ArtifactStore | None) -> None:
        self._profile, self._home, self._store = profile, home.absolute(), store
        self._api = KfpApi(profile.kubeflow)

    # Requests to Kubeflow.

    def observe(self, job_id: str) -> ObservedRun:
        runs = self._runs(job_id)
        if not runs:
            return ObservedRun()
        attempt, number, run = runs[-1]
        state = _STATES.get(str(run.state), "running")
        starts = number - self._counting(job_id, attempt, fetch=state == "failed").first + 1
        failure = None
        if state in ("running", "failed"):  # the latest run's, if any: `start` removes the one of earlier runs
            self._fetch(self._dir(job_id) / RUN_FAILURE)
            if (first := read_failure(self._dir(job_id))) is not None:
                failure = RunFailed(first.stage, first.key, first.failure.reason, first.failure.message,
                                    first.failure.hint)
        alive = state == "running"
        if failure is not None:
            state = "failed"
        # Kubeflow reports a Workflow that a user terminated as FAILED; its history has CANCELING.
        elif state == "failed" and (run.state == "CANCELED" or any(
                entry.state == "CANCELING" for entry in run.state_history or ())):
            failure = RunFailed(None, "", "RunTerminated",
                                f"run {run.display_name} was terminated in Kubeflow Pipelines",
                                "retry the job: it resumes after its finished stages")
        elif state == "failed" and starts < _UNEXPLAINED_FAILURES:
            state = "gone"
        elif state == "failed":
            said = " ".join(str(run.error.message).split())[:1000] if run.error and run.error.message else ""
            failure = RunFailed(None, "", "PipelineFailed",
                                said or f"run {run.display_name} failed, and no stage reported a failure",
                                f"inspect run {run.run_id} in Kubeflow Pipelines, then retry the job")
        return ObservedRun(state=state, attempt=attempt, starts=starts, run_id=run.run_id, failure=failure,
                           leftovers=alive and state == "failed")

    def start(self, job: JobFile) -> None:
        seen = self.observe(job.id)
        if seen.attempt == job.attempt and (seen.alive or seen.state == "succeeded"):
            return
        from eyrie_pipelines.placement import compile_for  # imports kfp: one second and 80 MB

        pipeline = compile_for(self._profile, job.resolved)
        job = self._write_job(job)
        number = self._runs(job.id)[-1][1] + 1 if seen.attempt == job.attempt else 1
        # Deaths are counted from this start on where the job has got further since the last count.
        self.refresh(job.id, job.resolved)
        done, counting = work_done(self._dir(job.id)), self._counting(job.id, job.attempt, fetch=True)
        if number == 1 or done > counting.work:
            write_model(self._dir(job.id) / _COUNTING, Counting(attempt=job.attempt, first=number, work=done))
            self.persist(job.id, _COUNTING)
        self._api.create_run(f"{job.id}-{job.attempt}.{number}", pipeline, {
            "job_dir": str(self._dir(job.id)), "spec_digest": digest_model(job), "code_version": code_version(),
            **job.run_parameters()})

    def _counting(self, job_id: str, attempt: int, *, fetch: bool) -> "Counting":
        path = self._dir(job_id) / _COUNTING
        if fetch:
            self._fetch(path)
        counting = read_record(path, Counting)
        return counting if counting is not None and counting.attempt == attempt else Counting(attempt=attempt)

    def discard(self, job_id: str, stages: Collection[StageName]) -> None:
        for stage in stages:
            directory = self._dir(job_id) / "stages" / stage
            if self._store is not None:
                self._store.delete_all(self._key(directory))
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)

    def stop(self, job_id: str) -> None:
        for _attempt, _starts, run in self._runs(job_id):
            if _STATES.get(str(run.state), "running") == "running" and run.state != "CANCELING":
                self._api.terminate_run(run.run_id)

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`. Race: several workers may pass this check at once, and each may then exceed `max_runs` by one.
        Hard limits are Kueue's and the namespace's quota; a lock over all workers would have to be held during requests
        to Kubeflow."""
        return num_running < self._profile.max_runs

    def _runs(self, job_id: str) -> list[tuple[int, int, Any]]:
        """Runs of a job as (attempt, start, run), sorted."""
        pattern = re.compile(re.escape(job_id) + r"-(\d+)\.(\d+)")
        matches = [(match, run) for run in self._api.find_runs(f"{job_id}-")
                   if (match := pattern.fullmatch(run.display_name or ""))]
        return sorted(((int(match[1]), int(match[2]), run) for match, run in matches),
                      key=lambda run: run[:2])

    # Files in the work area.

    def refresh(self, job_id: str, job: ResolvedJob) -> None:
        """See `Runner`: events and logs of unfinished stages, manifests of finished ones."""
        if self._store is None:
            return
        for name in (RUN_FAILURE, "outcome.json"):  # which the driver writes
            self._fetch(self._dir(job_id) / name)
        for stage in STAGES:
            keys = stage_keys(job, self._dir(job_id), stage)
            finished = [self._refresh_stage(job_id, stage, key) for key in keys]
            if not all(finished):
                return  # later stages cannot have started

    def _refresh_stage(self, job_id: str, stage: StageName, key: str) -> bool:
        """Whether the stage has finished."""
        directory = stage_dir(self._dir(job_id), stage, key)
        # Only prove may run again in a later attempt: by then the endpoint may serve another drafter.
        if stage != "prove" and (directory / MANIFEST).exists():
            return True
        # Race: the manifest is checked before events and log are read. Once it exists, both are complete.
        finished = self._store is not None and self._store.stat(self._key(directory / MANIFEST)) is not None
        for name in ("events.jsonl", "log.txt"):
            self._fetch_appended(directory / name)
        for name in ("spec.json", FAILURE_FILE, MANIFEST):
            if name != MANIFEST or finished:
                self._fetch(directory / name)
        if not finished:
            (directory / MANIFEST).unlink(missing_ok=True)
        return finished

    def persist(self, job_id: str, name: str) -> None:
        if self._store is not None:
            path = self._dir(job_id) / name
            self._store.write(self._key(path), path.read_bytes())

    def delete(self, job_id: str) -> None:
        self.stop(job_id)
        if self._store is not None:
            self._store.delete_all(self._key(self._dir(job_id)))

    def _write_job(self, new: JobFile) -> JobFile:
        """Write `job.json`, and remove the failure of the run before."""
        path, failure = self._dir(new.id) / JOB_FILE, self._dir(new.id) / RUN_FAILURE
        if self._store is not None:
            self._store.delete(self._key(failure))
        failure.unlink(missing_ok=True)
        self._fetch(path)
        before = read_record(path, JobFile)
        job = new.after(before)
        if job != before:
            write_model(path, job)
            self.persist(job.id, JOB_FILE)
        return job

    def _fetch(self, path: Path) -> None:
        """Download a small file; remove the local copy when the store has none."""
        if self._store is None:
            return
        try:
            data = self._store.read(self._key(path))
        except ArtifactMissing:
            path.unlink(missing_ok=True)
            return
        # An equal file is not rewritten: its modification time is the start of a stage.
        if not path.is_file() or path.read_bytes() != data:
            write_atomically(path, data)

    def _fetch_appended(self, path: Path) -> None:
        """Download what was appended to a file; one that is shorter than the local copy was replaced."""
        assert self._store is not None
        stored = self._store.stat(self._key(path))
        if stored is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and stored.size_bytes < path.stat().st_size:
            path.unlink(missing_ok=True)
        # Race: a driver whose lease has expired may read the same part. Both write it to the place that it has in the
        # stored file; appended, each event would be there twice.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            local_bytes = os.fstat(file.fileno()).st_size
            if local_bytes < stored.size_bytes:
                file.seek(local_bytes)
                file.write(self._store.read(self._key(path), start=local_bytes,
                                            length=stored.size_bytes - local_bytes))

    def _dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id

    def _key(self, path: Path) -> str:
        return path.relative_to(self._home).as_posix()


# Requests to Kubeflow.

_PAGE = 100
_EQUALS, _IS_SUBSTRING = 1, 9
"""Of filter.proto."""


class KubeflowUnavailable(Transient):
    """Kubeflow Pipelines does not respond, or limits requests."""


class KubeflowAccessDenied(Permanent):
    """Kubeflow Pipelines rejected the credentials, or a permission is missing."""

    exit_code = 77  # EX_NOPERM


class KubeflowNotFound(Permanent):
    """The resource does not exist, or the URL is not one of Kubeflow Pipelines."""


class PipelineRejected(InvalidInput):
    """Kubeflow Pipelines rejected the pipeline."""


class KfpApi:
    """One installation of Kubeflow Pipelines. The constructor sends no request."""

    def __init__(self, spec: KubeflowSpec) -> None:
        self._spec = spec
        configuration = kfp_server_api.Configuration(host=spec.url.rstrip("/"))
        configuration.ssl_ca_cert = spec.ca_file
        # urllib3 would repeat a creation whose response was lost, and create a second run.
        configuration.retries = False
        self._client = kfp_server_api.ApiClient(configuration)
        self._runs = kfp_server_api.RunServiceApi(self._client)
        self._experiments = kfp_server_api.ExperimentServiceApi(self._client)
        self._experiment_id: str | None = None

    def create_run(self, name: str, pipeline: dict[str, Any], parameters: dict[str, str]) -> None:
        """Create a run. The caller has checked that no run has this name."""
        run = kfp_server_api.V2beta1Run(
            display_name=name, experiment_id=self._experiment(), pipeline_spec=pipeline,
            service_account=self._spec.service_account,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters))
        self._request(self._runs.run_service_create_run, f"run {name}", run)

    def find_runs(self, part: str) -> list[Any]:
        """Runs whose display name contains `part`, oldest first."""
        runs: list[Any] = []
        query = {"experiment_id": self._experiment(), "page_size": _PAGE, "sort_by": "created_at asc",
                 "filter": _where(_IS_SUBSTRING, part)}
        while True:
            page = self._request(self._runs.run_service_list_runs, f"runs of {part}", **query)
            runs += page.runs or []
            if not page.next_page_token:
                return runs
            query["page_token"] = page.next_page_token

    def terminate_run(self, run_id: str) -> None:
        """Terminate a run; succeeds when it does not exist or has ended."""
        with contextlib.suppress(KubeflowNotFound):
            try:
                self._request(self._runs.run_service_terminate_run, f"run {run_id}", run_id)
            except (KubeflowNotFound, PipelineRejected):
                run = self._request(self._runs.run_service_get_run, f"run {run_id}", run_id)
                if run.state in ("PENDING", "RUNNING", "PAUSED"):
                    raise

    def _experiment(self) -> str:
        """The id of the experiment, created if it does not exist."""
        if self._experiment_id is None:
            self._experiment_id = self._find_experiment()
        if self._experiment_id is None:
            name = self._spec.experiment
            experiment = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self._spec.namespace)
            try:
                self._experiment_id = str(self._request(
                    self._experiments.experiment_service_create_experiment, f"experiment {name}",
                    experiment).experiment_id)
            except PipelineRejected:  # race: another process created it after we searched
                self._experiment_id = self._find_experiment()
                if self._experiment_id is None:
                    raise
        return self._experiment_id

    def _find_experiment(self) -> str | None:
        name = self._spec.experiment
        scope = {} if self._spec.namespace is None else {"namespace": self._spec.namespace}
        page = self._request(self._experiments.experiment_service_list_experiments, f"experiment {name}",
                             page_size=_PAGE, filter=_where(_EQUALS, name), **scope)
        return next((str(each.experiment_id) for each in page.experiments or [] if each.display_name == name), None)

    def _request(self, method: Callable[..., Any], what: str, *arguments: Any, **options: Any) -> Any:
        """Send one request, by a method of the generated client, and translate its errors."""
        self._client.set_default_header("Accept", "application/json")
        if self._spec.token_file is not None:
            path = Path(self._spec.token_file)
            try:
                self._client.set_default_header("Authorization", f"Bearer {path.read_text().strip()}")
            except OSError as error:
                raise KubeflowUnavailable(f"the token of Kubeflow Pipelines in {path} cannot be read: {error.strerror}",
                                          "will retry; mount the service account's token there") from None
        try:
            return method(*arguments, **options, _request_timeout=self._spec.timeout_s)
        except kfp_server_api.ApiException as error:
            raise _error_of(error, what, self._spec) from None
        except urllib3.exceptions.HTTPError as error:
            raise KubeflowUnavailable(
                f"Kubeflow Pipelines at {self._spec.url} does not respond ({type(error).__name__})",
                "will retry; check that it runs and that kubeflow.url is its URL") from None


def _where(operation: int, value: str) -> str:
    """The filter of display names."""
    return json.dumps({"predicates": [{"key": "display_name", "operation": operation, "string_value": value}]})


def _error_of(error: Any, what: str, spec: KubeflowSpec) -> Exception:
    """The exception for a response other than 2xx, with the server's message on one line."""
    status = int(error.status or 0)
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with contextlib.suppress(ValueError, AttributeError):
        document = json.loads(body)
        body = str(document.get("error") or document.get("message") or body)
    message = " ".join(body.split())
    detail = f": {message[:500]}" if message else ""
    if status == 0 or status == 408 or status == 429 or status >= 500:
        try:
            after_s = float((error.headers or {}).get("Retry-After", 5.0))
        except ValueError:  # Retry-After may also be a date
            after_s = 5.0
        return KubeflowUnavailable(f"Kubeflow Pipelines at {spec.url} answered {status} for {what}{detail}",
                                   after_s=after_s)
    if status in (401, 403):
        scope = "" if spec.namespace is None else f" in namespace {spec.namespace}"
        hint = ("correct kubeflow.token_file: the token's audience must be Kubeflow Pipelines" if status == 401
                else f"grant the service account create, get and terminate on runs{scope}")
        return KubeflowAccessDenied(f"Kubeflow Pipelines at {spec.url} answered {status} for {what}{detail}", hint)
    if status == 404:
        return KubeflowNotFound(f"Kubeflow Pipelines at {spec.url} has no {what}{detail}",
                                "check that kubeflow.url ends before /apis and that the server serves v2beta1")
    return PipelineRejected(f"Kubeflow Pipelines at {spec.url} rejected {what} with {status}{detail}",
                            "correct the job's placement or the cluster profile as the message says")

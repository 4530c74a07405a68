"""The runner of a cluster: a run is a run of Kubeflow Pipelines, observed through its API and the job's work area.

Run `<job id>-<attempt>.<n>` is the n-th start of an attempt; its name is the key by which it is found again, so nothing
needs to be remembered between two looks. `start` looks first and creates only when no run of the attempt lives: a
creation whose answer was lost is found the next time. The lease of a job keeps two drivers from creating at once.

    PENDING RUNNING PAUSED CANCELING     running
    these, and a stage said it failed    failed, with leftovers: whoever looks ends the run
    SUCCEEDED                            succeeded
    FAILED, and a stage said why         failed, with the stage's own reason, message and hint
    FAILED, and it was CANCELING before  failed: somebody ended it in Kubeflow (the job's own cancel is told before)
    CANCELED                             the same
    FAILED else                          gone: its pods were taken away once too often; from the third time on: failed
    SKIPPED, or no longer there          gone

A stage's failure is final (`run/failure.json`), but Kubeflow does not know: it would start the box again and again,
with growing pauses, each time to be told the same, and let the other boxes go on. So it is believed while the run
lives. What other boxes have done is kept, and a retry goes on from it.

The pipeline is compiled for each run, with every box in its place (`placement`), and travels inline. Only then
is kfp imported.
"""

import re
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import MANIFEST, code_version, digest_model, read_manifest, write_atomically, write_model
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.decisions.sweep import expand
from eyrie_api.errors import ArtifactMissing
from eyrie_api.submission.placement import place_stage
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.reports import TrainReport
from eyrie_api.v1alpha1.stages import STAGES, StageName
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_pipelines.kfp_api import KfpApi
from eyrie_pipelines.run_stage import FAILURE_FILE, read_failure
from eyrie_pipelines.runner import RunFailed, RunSeen, RunState
from eyrie_pipelines.steps import JOB_FILE, JobFile, list_checkpoints, trains_together
from eyrie_pipelines.work_area import RUN_FAILURE
from eyrie_workers.catalog import stage_dir

_STATES: dict[str, RunState] = {
    "PENDING": "running", "RUNNING": "running", "PAUSED": "running", "CANCELING": "running",
    "RUNTIME_STATE_UNSPECIFIED": "running", "SUCCEEDED": "succeeded", "FAILED": "failed", "CANCELED": "failed",
    "SKIPPED": "gone",
}
_SILENT_FAILURES = 3
"""Starts of an attempt after which a failure that no stage explains is believed."""

_KEPT = ("settled.json", "report.json")


class KubeflowRunner:
    """Runs of one installation. `store` is the work area; None where job directories lie on a shared volume."""

    def __init__(self, profile: ClusterProfile, home: Path, store: ArtifactStore | None) -> None:
        self._profile, self._home, self._store = profile, home.absolute(), store
        self._api = KfpApi(profile.kubeflow)

    # What is asked of Kubeflow.

    def observe(self, job_id: str) -> RunSeen:
        """See `Runner`."""
        runs = self._runs(job_id)
        if not runs:
            return RunSeen()
        attempt, starts, run = runs[-1]
        state = _STATES.get(str(run.state), "running")
        failure = self._told_failure(job_id) if state in ("running", "failed") else None
        lives = state == "running"
        if failure is not None:
            state = "failed"
        elif state == "failed" and _was_terminated(run):
            failure = RunFailed(None, "", "RunTerminated", f"run {run.display_name} was ended in Kubeflow Pipelines",
                                "retry the job: it goes on from what its stages have finished")
        elif state == "failed" and starts < _SILENT_FAILURES:
            state = "gone"
        elif state == "failed":
            failure = _unexplained(run)
        return RunSeen(state=state, attempt=attempt, starts=starts, run_id=run.run_id, failure=failure,
                       leftovers=lives and state == "failed")

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None) -> None:
        """See `Runner`."""
        seen = self.observe(job_id)
        if seen.attempt == attempt and (seen.alive or seen.state == "succeeded"):
            return
        from eyrie_pipelines.placement import compile_for  # kfp comes with it, a second and 80 MB

        gpus = place_stage(self._profile, spec.placement, "train").num_gpus
        pipeline = compile_for(self._profile, spec.placement, together=trains_together(spec, gpus))
        job = self._write_job(job_id, spec, attempt, incumbent)
        self._forget_failure(job_id)
        number = seen.starts + 1 if seen.attempt == attempt else 1
        self._api.create_run(f"{job_id}-{attempt}.{number}", pipeline, {
            "job_dir": str(self._dir(job_id)), "spec_digest": digest_model(job), "code_version": code_version()})

    def stop(self, job_id: str) -> None:
        """See `Runner`."""
        for _attempt, _starts, run in self._runs(job_id):
            if _STATES.get(str(run.state), "running") == "running" and run.state != "CANCELING":
                self._api.terminate_run(run.run_id)

    def pause(self, job_id: str) -> None:
        """See `Runner`: a run of Kubeflow needs no control plane."""

    def has_place(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`. Several workers may pass the last place at once: each may then exceed `max_runs` by one. Hard
        bounds are Kueue's and the namespace's quota; a lock over all workers would have to be held while Kubeflow is
        asked."""
        return num_running < self._profile.max_runs

    def _runs(self, job_id: str) -> list[tuple[int, int, Any]]:
        """Runs of a job: attempt, start, run; in that order."""
        pattern = re.compile(re.escape(job_id) + r"-(\d+)\.(\d+)")
        found = [(match, run) for run in self._api.find_runs(f"{job_id}-")
                 if (match := pattern.fullmatch(run.display_name or ""))]
        return sorted(((int(match[1]), int(match[2]), run) for match, run in found), key=lambda one: one[:2])

    def _told_failure(self, job_id: str) -> RunFailed | None:
        """What a stage of the latest run failed of, if one did: a start removes what the runs before it said."""
        self._fetch(self._dir(job_id) / RUN_FAILURE)
        first = read_failure(self._dir(job_id))
        if first is None:
            return None
        return RunFailed(first.stage, first.key, first.failure.reason, first.failure.message, first.failure.hint)

    # What lies in the work area.

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """See `Runner`: of stages that have not finished, what they say; of those that have, the manifest."""
        if self._store is None:
            return
        for name in (RUN_FAILURE, *_KEPT):
            self._fetch(self._dir(job_id) / name)
        for stage in STAGES:
            finished = [self._refresh_stage(job_id, stage, key) for key in self._keys(job_id, spec, stage)]
            if not all(finished):
                return  # later stages cannot have begun

    def _refresh_stage(self, job_id: str, stage: StageName, key: str) -> bool:
        """Whether the stage has finished."""
        directory = stage_dir(self._dir(job_id), stage, key)
        # The proof alone may be made anew in a later attempt: an endpoint may serve something else by then.
        if stage != "prove" and (directory / MANIFEST).exists():
            return True
        finished = self._has(directory / MANIFEST)  # asked first: what a stage says before its end is complete then
        for name in ("events.jsonl", "log.txt"):
            self._follow(directory / name)
        for name in ("spec.json", FAILURE_FILE, MANIFEST):
            if name != MANIFEST or finished:
                self._fetch(directory / name)
        if not finished:
            (directory / MANIFEST).unlink(missing_ok=True)
        return finished

    def _keys(self, job_id: str, spec: JobSpec, stage: StageName) -> list[str]:
        candidates = [one.name for one in expand(spec)]
        if stage == "train":
            return candidates
        if stage == "benchmark":
            trained = [read_manifest(stage_dir(self._dir(job_id), "train", name)).report for name in candidates]
            return [one.name for one in list_checkpoints([one for one in trained if isinstance(one, TrainReport)])]
        return [""]

    def keep(self, job_id: str, name: str) -> None:
        """See `Runner`."""
        if self._store is not None:
            path = self._dir(job_id) / name
            self._store.write(self._key(path), path.read_bytes())

    def forget(self, job_id: str) -> None:
        """See `Runner`."""
        self.stop(job_id)
        if self._store is not None:
            self._store.delete_all(self._key(self._dir(job_id)))

    def _write_job(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None) -> JobFile:
        path = self._dir(job_id) / JOB_FILE
        self._fetch(path)
        before = JobFile.model_validate_json(path.read_text()) if path.is_file() else None
        if before is not None and (before.id, before.spec, before.attempt) == (job_id, spec, attempt):
            return before
        job = JobFile(id=job_id, spec=spec, attempt=attempt, incumbent=incumbent)
        write_model(path, job)
        self.keep(job_id, JOB_FILE)
        return job

    def _forget_failure(self, job_id: str) -> None:
        path = self._dir(job_id) / RUN_FAILURE
        if self._store is not None:
            self._store.delete(self._key(path))
        path.unlink(missing_ok=True)

    def _fetch(self, path: Path) -> None:
        """Bring a small file; remove it here when it is not there."""
        if self._store is None:
            return
        try:
            data = self._store.read(self._key(path))
        except ArtifactMissing:
            path.unlink(missing_ok=True)
            return
        # Left alone when it is the same: its time says when a stage began.
        if not path.is_file() or path.read_bytes() != data:
            write_atomically(path, data)

    def _has(self, path: Path) -> bool:
        return self._store is not None and self._store.stat(self._key(path)) is not None

    def _follow(self, path: Path) -> None:
        """Bring what a growing file has gained; one that has become shorter is a new one."""
        assert self._store is not None
        there = self._store.stat(self._key(path))
        here = path.stat().st_size if path.is_file() else 0
        if there is None or there.size_bytes == here:
            return
        if there.size_bytes < here:
            path.unlink()
            here = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(self._store.read(self._key(path), start=here, length=there.size_bytes - here))

    def _dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id

    def _key(self, path: Path) -> str:
        return path.relative_to(self._home).as_posix()


def _was_terminated(run: Any) -> bool:
    """By somebody's hand. A Workflow that is ended has failed, for Kubeflow; its history knows better."""
    return run.state == "CANCELED" or any(one.state == "CANCELING" for one in run.state_history or ())


def _unexplained(run: Any) -> RunFailed:
    said = " ".join(str(run.error.message).split())[:1000] if run.error is not None and run.error.message else ""
    return RunFailed(None, "", "PipelineFailed", said or f"run {run.display_name} failed and no stage says why",
                     f"look at run {run.run_id} in Kubeflow Pipelines, then retry the job")

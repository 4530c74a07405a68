"""The Kubeflow Pipelines API, as far as runs need it: v2beta1 by kfp's generated client, which needs no kfp.

    experiments  found by display name, or created
    runs         created with the pipeline inline, found by display name, read, terminated

KFP has no idempotency key, so the name of a run is one: whoever creates looks for the name first. What may pass (no
answer, 429, 5xx) is `KubeflowAway`; what does not says what to hint. The bearer token is read for each request, since a
projected one is rotated; it never appears in a message.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import kfp_server_api
import urllib3

from eyrie_api.errors import InvalidInput, Permanent, Transient
from eyrie_api.v1alpha1.cluster import KubeflowSpec

_PAGE = 100
_EQUALS, _IS_SUBSTRING = 1, 9
"""Of filter.proto."""

ResultT = TypeVar("ResultT")


class KubeflowAway(Transient):
    """Kubeflow Pipelines does not answer, or asks to be left alone for a while."""

    reason = "KubeflowAway"


class KubeflowRefused(Permanent):
    """Kubeflow Pipelines knows us not, or will not let us."""

    exit_code = 77  # EX_NOPERM
    reason = "KubeflowRefused"


class KubeflowMissing(Permanent):
    """Kubeflow Pipelines has no such thing, or is not what answers there."""

    reason = "KubeflowMissing"


class PipelineRefused(InvalidInput):
    """Kubeflow Pipelines will not take the pipeline."""

    reason = "PipelineRefused"


class KfpApi:
    """One installation of Kubeflow Pipelines. Cheap to make; nothing is asked before it is needed."""

    def __init__(self, given: KubeflowSpec) -> None:
        self._given = given
        configuration = kfp_server_api.Configuration(host=given.url.rstrip("/"))
        configuration.ssl_ca_cert = given.ca_file
        # urllib3 would repeat a creation whose answer was lost, and we would not know.
        configuration.retries = False
        self._client = kfp_server_api.ApiClient(configuration)
        self._runs = kfp_server_api.RunServiceApi(self._client)
        self._experiments = kfp_server_api.ExperimentServiceApi(self._client)
        self._experiment_id: str | None = None

    def create_run(self, name: str, pipeline: dict[str, Any], parameters: dict[str, str]) -> str:
        """Create a run and return its id. Whoever calls has looked for `name`."""
        run = kfp_server_api.V2beta1Run(
            display_name=name, experiment_id=self._experiment(), pipeline_spec=pipeline,
            service_account=self._given.service_account,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters))
        made = self._ask(lambda options: self._runs.run_service_create_run(run, **options), f"run {name}")
        return str(made.run_id)

    def find_runs(self, part: str) -> list[Any]:
        """Runs whose display name has `part` in it, oldest first."""
        found: list[Any] = []
        wanted = {"experiment_id": self._experiment(), "page_size": _PAGE, "sort_by": "created_at asc",
                  "filter": _where("display_name", _IS_SUBSTRING, part)}
        while True:
            page = self._ask(lambda options: self._runs.run_service_list_runs(**wanted, **options), f"runs of {part}")
            found += page.runs or []
            if not page.next_page_token:
                return found
            wanted["page_token"] = page.next_page_token

    def read_run(self, run_id: str) -> Any | None:
        """A run; None when it is gone."""
        try:
            return self._ask(lambda options: self._runs.run_service_get_run(run_id, **options), f"run {run_id}")
        except KubeflowMissing:
            return None

    def terminate_run(self, run_id: str) -> None:
        """Ask a run to end; one that is gone, or has ended, is fine."""
        try:
            self._ask(lambda options: self._runs.run_service_terminate_run(run_id, **options), f"run {run_id}")
        except (KubeflowMissing, PipelineRefused):
            run = self.read_run(run_id)
            if run is not None and run.state in ("PENDING", "RUNNING", "PAUSED"):
                raise

    def _experiment(self) -> str:
        """The id of the experiment, which is made when there is none."""
        if self._experiment_id is None:
            self._experiment_id = self._find_experiment() or self._create_experiment()
        return self._experiment_id

    def _find_experiment(self) -> str | None:
        name = self._given.experiment
        scope = {} if self._given.namespace is None else {"namespace": self._given.namespace}
        page = self._ask(lambda options: self._experiments.experiment_service_list_experiments(
            page_size=_PAGE, filter=_where("display_name", _EQUALS, name), **scope, **options), f"experiment {name}")
        return next((str(one.experiment_id) for one in page.experiments or [] if one.display_name == name), None)

    def _create_experiment(self) -> str:
        name = self._given.experiment
        wanted = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self._given.namespace)
        try:
            made = self._ask(lambda options: self._experiments.experiment_service_create_experiment(
                wanted, **options), f"experiment {name}")
        except PipelineRefused:  # another process made it meanwhile
            found = self._find_experiment()
            if found is None:
                raise
            return found
        return str(made.experiment_id)

    def _ask(self, call: Callable[[dict[str, Any]], ResultT], what: str) -> ResultT:
        """One request, with its errors told apart."""
        self._client.set_default_header("Accept", "application/json")
        if self._given.token_file is not None:
            self._client.set_default_header("Authorization", f"Bearer {_read_token(Path(self._given.token_file))}")
        try:
            return call({"_request_timeout": self._given.timeout_s})
        except kfp_server_api.ApiException as error:
            raise _told(error, what, self._given) from None
        except urllib3.exceptions.HTTPError as error:
            raise KubeflowAway(f"Kubeflow Pipelines at {self._given.url} does not answer ({type(error).__name__})",
                               "will retry; see that it runs, and that kubeflow.url leads there") from None


def _where(key: str, operation: int, value: str) -> str:
    return json.dumps({"predicates": [{"key": key, "operation": operation, "string_value": value}]})


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise KubeflowAway(f"the token of Kubeflow Pipelines in {path} cannot be read: {error.strerror}",
                           "will retry; mount the service account's token there") from None


def _told(error: Any, what: str, given: KubeflowSpec) -> Exception:
    """What an answer other than 2xx means."""
    status = int(error.status or 0)
    said = _words_of(error)
    if status == 0 or status == 408 or status == 429 or status >= 500:
        return KubeflowAway(f"Kubeflow Pipelines at {given.url} answered {status} for {what}{said}",
                            after_s=_after(error))
    if status in (401, 403):
        scope = "" if given.namespace is None else f" in namespace {given.namespace}"
        hint = ("correct kubeflow.token_file: its token must be meant for Kubeflow Pipelines" if status == 401
                else f"let the service account create, read and terminate runs{scope}")
        return KubeflowRefused(f"Kubeflow Pipelines at {given.url} answered {status} for {what}{said}", hint)
    if status == 404:
        return KubeflowMissing(f"Kubeflow Pipelines at {given.url} has no {what}{said}",
                        "see that kubeflow.url ends before /apis and that the server speaks v2beta1")
    return PipelineRefused(f"Kubeflow Pipelines at {given.url} refused {what} with {status}{said}",
                           "correct the job's placement or the cluster profile, as its words say")


def _after(error: Any) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 5.0))
    except ValueError:  # it may be a date
        return 5.0


def _words_of(error: Any) -> str:
    """What the server says, in one line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        document = json.loads(body)
        body = str(document.get("error") or document.get("message") or body)
    except (ValueError, AttributeError):
        pass
    words = " ".join(body.split())
    return f": {words[:500]}" if words else ""

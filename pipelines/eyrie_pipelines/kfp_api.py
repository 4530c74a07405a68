"""The part of the Kubeflow Pipelines API that runs need: v2beta1 by kfp's generated client, which does not import kfp.

    experiments  found by display name, or created
    runs         created with the pipeline inline, found by display name, read, terminated

KFP has no idempotency key. The name of a run serves as one: callers search for the name before they create a run.
Temporary errors (no response, 429, 5xx) raise `KubeflowUnavailable`; others carry a hint. The bearer token is read for
each request, since a projected token is rotated; it never appears in a message.
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


class KubeflowUnavailable(Transient):
    """Kubeflow Pipelines does not respond, or limits requests."""

    reason = "KubeflowUnavailable"


class KubeflowAccessDenied(Permanent):
    """Kubeflow Pipelines rejected the credentials, or a permission is missing."""

    exit_code = 77  # EX_NOPERM
    reason = "KubeflowAccessDenied"


class KubeflowNotFound(Permanent):
    """The resource does not exist, or the URL is not one of Kubeflow Pipelines."""

    reason = "KubeflowNotFound"


class PipelineRejected(InvalidInput):
    """Kubeflow Pipelines rejected the pipeline."""

    reason = "PipelineRejected"


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

    def create_run(self, name: str, pipeline: dict[str, Any], parameters: dict[str, str]) -> str:
        """Create a run and return its id. The caller has checked that no run has this name."""
        run = kfp_server_api.V2beta1Run(
            display_name=name, experiment_id=self._experiment(), pipeline_spec=pipeline,
            service_account=self._spec.service_account,
            runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters=parameters))
        created = self._request(lambda options: self._runs.run_service_create_run(run, **options), f"run {name}")
        return str(created.run_id)

    def find_runs(self, part: str) -> list[Any]:
        """Runs whose display name contains `part`, oldest first."""
        runs: list[Any] = []
        query = {"experiment_id": self._experiment(), "page_size": _PAGE, "sort_by": "created_at asc",
                 "filter": _where("display_name", _IS_SUBSTRING, part)}
        while True:
            page = self._request(lambda options: self._runs.run_service_list_runs(**query, **options),
                                 f"runs of {part}")
            runs += page.runs or []
            if not page.next_page_token:
                return runs
            query["page_token"] = page.next_page_token

    def read_run(self, run_id: str) -> Any | None:
        """A run; None when it does not exist."""
        try:
            return self._request(lambda options: self._runs.run_service_get_run(run_id, **options), f"run {run_id}")
        except KubeflowNotFound:
            return None

    def terminate_run(self, run_id: str) -> None:
        """Terminate a run; succeeds when it does not exist or has ended."""
        try:
            self._request(lambda options: self._runs.run_service_terminate_run(run_id, **options), f"run {run_id}")
        except (KubeflowNotFound, PipelineRejected):
            run = self.read_run(run_id)
            if run is not None and run.state in ("PENDING", "RUNNING", "PAUSED"):
                raise

    def _experiment(self) -> str:
        """The id of the experiment, created if it does not exist."""
        if self._experiment_id is None:
            self._experiment_id = self._find_experiment() or self._create_experiment()
        return self._experiment_id

    def _find_experiment(self) -> str | None:
        name = self._spec.experiment
        scope = {} if self._spec.namespace is None else {"namespace": self._spec.namespace}
        page = self._request(lambda options: self._experiments.experiment_service_list_experiments(
            page_size=_PAGE, filter=_where("display_name", _EQUALS, name), **scope, **options), f"experiment {name}")
        return next((str(each.experiment_id) for each in page.experiments or [] if each.display_name == name), None)

    def _create_experiment(self) -> str:
        name = self._spec.experiment
        experiment = kfp_server_api.V2beta1Experiment(display_name=name, namespace=self._spec.namespace)
        try:
            created = self._request(lambda options: self._experiments.experiment_service_create_experiment(
                experiment, **options), f"experiment {name}")
        except PipelineRejected:  # race: another process created it after we searched
            existing = self._find_experiment()
            if existing is None:
                raise
            return existing
        return str(created.experiment_id)

    def _request(self, call: Callable[[dict[str, Any]], ResultT], what: str) -> ResultT:
        """Send one request and translate its errors."""
        self._client.set_default_header("Accept", "application/json")
        if self._spec.token_file is not None:
            self._client.set_default_header("Authorization", f"Bearer {_read_token(Path(self._spec.token_file))}")
        try:
            return call({"_request_timeout": self._spec.timeout_s})
        except kfp_server_api.ApiException as error:
            raise _error_of(error, what, self._spec) from None
        except urllib3.exceptions.HTTPError as error:
            raise KubeflowUnavailable(
                f"Kubeflow Pipelines at {self._spec.url} does not respond ({type(error).__name__})",
                "will retry; check that it runs and that kubeflow.url is its URL") from None


def _where(key: str, operation: int, value: str) -> str:
    return json.dumps({"predicates": [{"key": key, "operation": operation, "string_value": value}]})


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise KubeflowUnavailable(f"the token of Kubeflow Pipelines in {path} cannot be read: {error.strerror}",
                                  "will retry; mount the service account's token there") from None


def _error_of(error: Any, what: str, spec: KubeflowSpec) -> Exception:
    """The exception for a response other than 2xx."""
    status = int(error.status or 0)
    detail = _message_of(error)
    if status == 0 or status == 408 or status == 429 or status >= 500:
        return KubeflowUnavailable(f"Kubeflow Pipelines at {spec.url} answered {status} for {what}{detail}",
                                   after_s=_retry_after_s(error))
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


def _retry_after_s(error: Any) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 5.0))
    except ValueError:  # Retry-After may also be a date
        return 5.0


def _message_of(error: Any) -> str:
    """The server's error message on one line, with a leading colon."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        document = json.loads(body)
        body = str(document.get("error") or document.get("message") or body)
    except (ValueError, AttributeError):
        pass
    message = " ".join(body.split())
    return f": {message[:500]}" if message else ""

"""`eyrie publish`: a job's drafter with its card and its measured results, in a directory or a repository of the Hub.

The files come through the REST API, so the command runs wherever the server can be reached, and every file is compared
with its digest. The card's program (`python -m eyrie_workers.drafters.card`) adds the results. What a report
knows of the server, its paths and command lines, is left out.

A repository is created private (`--public`: public), and written in one commit.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyrie_api.client import Client
from eyrie_api.errors import Conflict, EyrieError, InvalidInput, NotFound, Permanent, Transient
from eyrie_api.v1alpha1.status import JobReport, StageFile

PROGRAM = "eyrie_workers.drafters.card"
RESULTS = "results.json"
_OF_THE_SERVER = ("path", "drafter_dir", "launch", "variants", "model")


class NotPublished(Permanent):
    """The card could not be written, or the Hub refused the files."""

    reason = "NotPublished"


def checkpoint_to_publish(report: JobReport, wanted: str | None) -> str:
    """The named checkpoint; by default the tuned one, else the best that the job trained. Raises NotFound. Pure."""
    measured = [one.checkpoint for one in report.benchmark if not one.rival]
    if wanted is not None:
        if wanted not in measured:
            raise NotFound(f"job {report.job_id} has no measured checkpoint {wanted!r} of its own",
                           f"its checkpoints are {', '.join(measured) or '(none yet)'}")
        return wanted
    if report.tune is not None and report.tune.checkpoint in measured:
        return report.tune.checkpoint
    best = next((one.checkpoint for one in report.leaderboard if one.checkpoint in measured), None)
    if best is None:
        raise NotFound(f"job {report.job_id} has no measured checkpoint yet", "wait for its benchmark stage")
    return best


def results_of(report: JobReport, checkpoint: str) -> dict[str, Any]:
    """What was measured of a checkpoint, without what concerns the server alone. Pure."""
    found: dict[str, Any] = {"benchmark": next(one for one in report.benchmark if one.checkpoint == checkpoint)}
    if report.tune is not None and report.tune.checkpoint == checkpoint:
        found |= {"tuned": report.tune.final, "operating_map": report.tune.map}
        if report.prove is not None:
            found["proof"] = report.prove
    return {name: _public(value.model_dump(mode="json")) for name, value in found.items() if value is not None}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items() if key not in _OF_THE_SERVER}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return value


def publish(client: Client, job_id: str, checkpoint: str | None, out: Path) -> str:
    """Write a checkpoint of a job with its results into `out`, which must not exist yet; returns its name.

    Raises NotFound, Conflict for an existing directory, NotPublished.
    """
    if out.exists():
        raise Conflict(f"{out} exists", "name a directory that does not exist yet, or remove it")
    report = client.report(job_id)
    name = checkpoint_to_publish(report, checkpoint)
    files = [file for file in client.artifacts(job_id, "train") if file.path.startswith(f"checkpoints/{name}/")]
    if not files:
        raise NotFound(f"the files of {name} are not among the job's artifacts",
                       "`eyrie storage` may have removed them: train again")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".publish-") as scratch:
        results = results_of(report, name)
        _download(client, files, Path(scratch) / name)
        (Path(scratch) / RESULTS).write_text(json.dumps(results))
        done = subprocess.run([sys.executable, "-m", PROGRAM, str(Path(scratch) / name), str(out), "--results",
                               str(Path(scratch) / RESULTS)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPublished(f"the card was not written: {(done.stderr.strip().splitlines() or ['no output'])[-1]}",
                           "install the workers here (pip install 'eyrie[local]'), or train the drafter again")
    return name


def _download(client: Client, files: list[StageFile], directory: Path) -> None:
    for file in files:
        client.download(file, directory)


def upload(directory: Path, repository: str, *, public: bool, message: str) -> str:
    """Write a directory into a repository of the Hub, in one commit; returns its address. The Hub is that of
    HF_ENDPOINT, the token that of HF_TOKEN or of `hf auth login`.

    Raises InvalidInput without the package, NotPublished when the Hub refuses, Transient when it cannot be reached.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise InvalidInput("writing to the Hub needs the package huggingface_hub, which is not installed here",
                           "pip install huggingface_hub, or publish into a directory with --out") from None
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message=message)
    except HFValidationError as error:
        raise InvalidInput(f"--to {repository!r}: {_first_line(error)}", "give org/name") from None
    except HfHubHTTPError as error:
        raise _refused(repository, error) from None
    except OSError as error:
        raise Transient(f"the Hub at {api.endpoint} cannot be reached: {_first_line(error)}",
                        "check the network and HF_ENDPOINT") from None
    return f"{api.endpoint}/{repository}"


def _refused(repository: str, error: Exception) -> EyrieError:
    return NotPublished(f"the Hub refused {repository}: {_first_line(error)}",
                        "set HF_TOKEN to a token that may write there, or sign in with `hf auth login`")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)

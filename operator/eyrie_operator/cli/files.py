"""Commands that work on files: `eyrie certify --check-only`, `eyrie publish`, `eyrie data push`.

certify --check-only: whether SGLang and vLLM can serve a drafter directory as it was trained. The check needs tensors,
so it runs in a child process with torch, `python -m eyrie_workers.drafters.check`. Its output is one JSON document,
rendered here: errors first, each with its hint.

publish: a job's drafter with its card and its measured results, in a directory or a repository of the Hub. The files
come through the REST API, so the command runs wherever the server can be reached, and every file is compared with its
digest. The card's program (`python -m eyrie_workers.drafters.card`) adds the results. What a report knows of
the server, its paths and command lines, is left out. A repository is created private (`--public`: public), and written
in one commit.

data push: data files of this machine into a bucket, from which stages read them as streams. The files are those that
`data.sources[].path` would name here, checked as a submission checks them, before any byte is sent. A file that the
bucket has already, by size and digest, is skipped, and a large one resumes with its missing parts, so that the command
is simply repeated after an interruption. Access is that of the artifact store (EYRIE_ARTIFACTS_*, or AWS's default
chain).
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from eyrie_api.artifacts import digest_file
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.cli.verbs import Screen, printable
from eyrie_api.client import Client
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.status import JobReport
from eyrie_api.data_files import S3, data_files
from eyrie_api.decisions.job_report import results_for_card
from eyrie_api.errors import Conflict, EyrieError, InvalidInput, NotFound, Permanent, TargetNotFound, Transient
from eyrie_api.planning.data_files import check_data_source

CHECK_PROGRAM = "eyrie_workers.drafters.check"
EXIT_DEFECTIVE = 65  # EX_DATAERR
_STYLE = {"error": "bold red", "warning": "yellow"}


class CheckFailed(Permanent):
    """The check program ended without a result."""


def check(directories: Sequence[str], target: str | None, context: int | None, screen: Screen, *, fast: bool) -> bool:
    """Check each directory and show the findings; returns whether all are servable. Raises as `run_check`."""
    if not directories:
        raise InvalidInput("no drafter was given", "give the directory of an exported drafter")
    options = [*(["--target", target] if target else []), *(["--fast"] if fast else []),
               *(["--context", str(context)] if context else [])]
    documents = [run_check([directory, *options]) for directory in directories]
    screen.show(documents, Group(*map(verdict, documents)))
    return not any(map(is_defective, documents))


def run_check(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the check with these arguments; returns its document. Raises the error it reports, or CheckFailed."""
    argv = [sys.executable, "-m", CHECK_PROGRAM, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise CheckFailed(f"the check ended with {done.returncode}: {printable(last[0])}",
                          "install the workers extra (torch) here, or report this") from None
    if "error" in document:
        raise refusal(document["error"])
    assert isinstance(document, dict)
    return document


def refusal(error: Mapping[str, Any]) -> EyrieError:
    """The child's error as one of our classes."""
    kind = TargetNotFound if error["reason"] == TargetNotFound.reason else InvalidInput
    return kind(str(error["message"]), str(error.get("hint", "")))


def is_defective(document: Mapping[str, Any]) -> bool:
    return any(finding["severity"] == "error" for finding in document["findings"])


def verdict(document: Mapping[str, Any]) -> RenderableType:
    """The findings, rendered."""
    findings = document["findings"]
    parts: list[RenderableType] = []
    for severity in ("error", "warning"):
        selected = [finding for finding in findings if finding["severity"] == severity]
        if selected:
            plural = "s" if len(selected) > 1 else ""
            parts.append(Text(f"{len(selected)} {severity}{plural}", style=_STYLE[severity]))
            for finding in selected:
                message = Text.assemble((f"{finding['code']}: ", _STYLE[severity]), printable(finding["what"]))
                hint = Text.assemble(("hint: ", "green"), printable(finding["hint"]))
                parts.append(Group(Padding(message, (0, 0, 0, 2), expand=False),
                                   Padding(hint, (0, 0, 0, 4), expand=False)))
    engines = " and ".join(f"{name} {version}" for name, version in document["engines"].items())
    target = f" for {document['target']}" if document.get("target") else ", by itself (name its --target to check both)"
    if not findings:
        parts.append(Text.assemble(("Sound: ", "bold green"), f"{document['drafter']}{target}. No findings by the "
                                                              f"rules of {engines}."))
    elif not is_defective(document):
        parts.append(Text.assemble(("Servable, ", "bold green"),
                                   f"with warnings: {document['drafter']}{target}, by the rules of {engines}."))
    else:
        parts.append(Text.assemble(("Not servable: ", "bold red"), f"{document['drafter']}{target}, by the rules of "
                                                                   f"{engines}."))
    return Group(*parts)


CARD_PROGRAM = "eyrie_workers.drafters.card"
RESULTS = "results.json"


class NotPublished(Permanent):
    """The card could not be written, or the Hub refused the files."""


def checkpoint_to_publish(report: JobReport, wanted: str | None) -> str:
    """The named checkpoint; by default the tuned one, else the best that the job trained. Raises NotFound. Pure."""
    measured = [benchmark.checkpoint for benchmark in report.benchmark if not benchmark.rival]
    if wanted is not None:
        if wanted not in measured:
            raise NotFound(f"job {report.job_id} has no measured checkpoint {wanted!r} of its own",
                           f"its checkpoints are {', '.join(measured) or '(none yet)'}")
        return wanted
    if report.tune is not None and report.tune.checkpoint in measured:
        return report.tune.checkpoint
    best = next((entry.checkpoint for entry in report.leaderboard if entry.checkpoint in measured), None)
    if best is None:
        raise NotFound(f"job {report.job_id} has no measured checkpoint yet", "wait for its benchmark stage")
    return best


def publish(client: Client, job_id: str, checkpoint: str | None, out: Path) -> str:
    """Write a checkpoint of a job with its results into `out`, which must not exist yet; returns its name.

    Raises NotFound, Conflict for an existing directory, NotPublished.
    """
    if out.exists():
        raise Conflict(f"{out} exists", "name a directory that does not exist yet, or remove it")
    report = client.report(job_id)
    name = checkpoint_to_publish(report, checkpoint)
    files = [file for file in client.artifacts(job_id, "train") if file.path.startswith(f"checkpoints/{name}/")]
    if not files and not client.job(job_id).spec.trains:
        raise NotFound(f"{name} was not trained by job {job_id}", "publish it from where it was trained")
    if not files:
        raise NotFound(f"the files of {name} are not among the job's artifacts",
                       "`eyrie storage` may have removed them: train again")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".publish-") as scratch:
        results = results_for_card(
            benchmark=next(benchmark for benchmark in report.benchmark if benchmark.checkpoint == name))
        if report.tune is not None and report.tune.checkpoint == name:
            results |= results_for_card(tuned=report.tune.final, operating_map=report.tune.map, proof=report.prove)
        for file in files:
            client.download(file, Path(scratch) / name)
        (Path(scratch) / RESULTS).write_text(json.dumps(results))
        done = subprocess.run([sys.executable, "-m", CARD_PROGRAM, str(Path(scratch) / name), str(out), "--results",
                               str(Path(scratch) / RESULTS)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPublished(f"the card was not written: {(done.stderr.strip().splitlines() or ['no output'])[-1]}",
                           "install the workers here (pip install 'eyrie[local]'), or train the drafter again")
    return name


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
        raise NotPublished(f"the Hub refused {repository}: {_first_line(error)}", "set HF_TOKEN to a token that may "
                           "write there, or sign in with `hf auth login`") from None
    except OSError as error:
        raise Transient(f"the Hub at {api.endpoint} cannot be reached: {_first_line(error)}",
                        "check the network and HF_ENDPOINT") from None
    return f"{api.endpoint}/{repository}"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


FOLDER = "data"
"""Below the artifact store's URL, where no other place is given."""


class Pushed(Frozen):
    """What is in the bucket afterwards."""

    path: str
    """For `data.sources[].path`."""

    files: int
    sent: int
    """Files that the bucket did not have."""

    bytes: int


def destination(path: Path, to: str | None, options: StoreOptions) -> str:
    """The URL to write to. Raises InvalidInput for what is no bucket. Pure."""
    url = to or (f"{options.url.rstrip('/')}/{FOLDER}/{path.absolute().name}" if options.url else "")
    if not url.startswith(S3):
        raise InvalidInput(f"--to {url or '(none)'} is not in a bucket",
                           "give --to s3://bucket/prefix, or set EYRIE_ARTIFACTS_URL to a bucket")
    return url.rstrip("/")


def push(path: Path, to: str | None, screen: Screen) -> Pushed:
    """Upload, with progress on stderr. Raises NoUsableData for what no job would read, and the store's errors."""
    options = StoreOptions.from_env()
    url = destination(path, to, options)
    check_data_source(DataSource(path=str(path)))
    files, store, lock = data_files(str(path)), open_store(url, options), threading.Lock()
    sizes = {file: file.stat().st_size for file in files}
    sent = 0
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                  TimeRemainingColumn(), console=screen.err, disable=screen.as_json, transient=True) as progress:
        whole = progress.add_task("uploading", total=sum(sizes.values()))

        def advance(num_bytes: int) -> None:
            with lock:
                progress.advance(whole, num_bytes)

        for file in files:
            progress.update(whole, description=file.name)
            stored = store.stat(file.name)
            if stored is not None and (stored.size_bytes, stored.sha256) == (sizes[file], digest_file(file)):
                advance(sizes[file])
                continue
            store.upload(file.name, file, advance)
            sent += 1
    alone = len(files) == 1 and not path.is_dir()
    return Pushed(path=f"{url}/{files[0].name}" if alone else url, files=len(files), sent=sent,
                  bytes=sum(sizes.values()))

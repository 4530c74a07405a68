"""The client verbs of the `eyrie` command: each a call or two of the REST API, rendered.

`app` here needs no control plane, no torch and no cluster on this machine, only a server's address (--server or
EYRIE_SERVER). The whole command, with `up`, `down` and `demo`, is `eyrie_operator.command`, which adds its verbs to
this one. Every verb takes --json (see `verbs.Screen`) and ends with the exit code of the EyrieError it met, 0
otherwise; 2 is a wrong command line.
"""

import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args
from urllib.parse import urlsplit

import typer
from rich.text import Text

from eyrie_api.artifacts import installed_version
from eyrie_api.cli import access, plots, tables, watch
from eyrie_api.cli import chat as chatting
from eyrie_api.cli.spec import build_job, comparison, measurement
from eyrie_api.cli.verbs import Json, Screen, Server, connect, printable, server_verb, verb
from eyrie_api.client import DEFAULT_SERVER, Client
from eyrie_api.clock import utc_now
from eyrie_api.contract.endpoints import HistoryKind
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.data_files import SUFFIXES, is_pattern, is_remote
from eyrie_api.errors import EyrieError, GpuTooSmall, InvalidInput, NotFound, NoUsableData, TargetNotFound
from eyrie_api.settings import DEFAULT_PORT, Settings

app = typer.Typer(
    name="eyrie", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
endpoints_app = typer.Typer(no_args_is_help=False, help="List endpoints; promote, roll back, switch off and on.")
for _name, _commands in (("endpoints", endpoints_app), ("keys", access.keys_app), ("projects", access.projects_app),
                         ("webhooks", access.webhooks_app)):
    app.add_typer(_commands, name=_name)


def _show_version(asked: bool) -> None:
    if asked:
        print(installed_version())
        raise typer.Exit


@app.callback()
def eyrie(version: Annotated[bool, typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False) -> None:
    """Train, choose and serve a speculative-decoding drafter for your own LLM."""


JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id, its beginning, or its name.")]
Watch = Annotated[bool, typer.Option("--watch/--no-watch", help="Watch until it ends. Ctrl-C ends the watch only.")]
Target = Annotated[str | None, typer.Option("--target", help="Hugging Face directory, Hub id, or quickstart.")]
Data = Annotated[list[str] | None, typer.Option("--data", help="File, directory, s3:// or https:// URL, Hub id.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="Job document in YAML or JSON.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Any field, e.g. train.epochs=3.")]


def is_local(server: str) -> bool:
    """Whether the server runs on this machine, so that local paths are valid there."""
    return (urlsplit(server).hostname or "") in ("127.0.0.1", "localhost", "::1")


def absolute_paths(job: JobSpec, server: str, target: str | None = None, data: Sequence[str] = ()) -> JobSpec:
    """The job with absolute local paths: the server has another working directory. Raises TargetNotFound, NoUsableData
    or InvalidInput for what does not exist.

    target, data   what was given by --target and --data: such a value is named by its option, another by its field
    """
    if not is_local(server):
        return job

    def absolute(field: str, path: str) -> str:
        if field == "promotion.drift.traffic_file" and not is_remote(path):  # it may be written later
            return str(Path(path).expanduser().absolute())
        if field == "target.model":
            return _absolute(path, "--target" if path == target else field, TargetNotFound)
        if field.startswith("data."):
            return _absolute(path, "--data" if path in data else field, NoUsableData)
        return _absolute(path, field)

    return job.with_paths(absolute)


def _absolute(path: str, named: str, missing: type[InvalidInput] = InvalidInput) -> str:
    if path in ("quickstart", "held-out") or is_remote(path):
        return path
    here = Path(path).expanduser()
    if here.exists():
        return str(here.resolve())
    if is_pattern(path) and here.parent.is_dir():
        return str(here.absolute())
    if path.startswith((".", "/", "~")) or path.endswith(SUFFIXES) or is_pattern(path):
        raise missing(f"{named} {path}: no such file or directory",
                      f"give a path that exists (we are in {Path.cwd()}), or a Hub id like org/name")
    return path


def find_job(client: Client, wanted: str) -> Job:
    """A job by id, by name (the newest), or by the beginning of its id (of the 50 newest).

    Raises NotFound or InvalidInput.
    """
    try:
        return client.job(wanted)
    except EyrieError as error:
        if error.http_status != 404:
            raise
        named = client.jobs(name=wanted, limit=1).items
        if named:
            return named[0]
        matching = [job for job in client.jobs().items if job.id.startswith(wanted)]
        if len(matching) > 1:
            raise InvalidInput(f"{wanted!r} begins {len(matching)} job ids", "give more of the id") from None
        if not matching:
            raise
        return matching[0]


@app.command()
@verb
def train(
    target: Target = None,
    data: Data = None,
    file: File = None,
    name: Annotated[str | None, typer.Option("--name", help="Display name; accepted in place of the id.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Hub branch, tag or commit.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    settings: Set = None,
    follow: Watch = True,
    local: Annotated[bool, typer.Option("--local", help="Start a control plane here if none is running.")] = False,
    server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """Train a drafter for a target: regenerate, capture, train, benchmark, tune, prove, promote."""
    job = build_job(file=file, name=name, target=target, revision=revision, dtype=dtype, data=data or (),
                    settings=settings or ())
    submit(absolute_paths(job, server, target, data or ()), server, Screen(as_json=as_json), follow, local)


@app.command()
@verb
def compare(
    target: Target = None,
    data: Data = None,
    file: File = None,
    families: Annotated[str | None, typer.Option(
        "--families", metavar="NAME,NAME,...",
        help="Default: all that the job's engine can serve, without dspark and mtp.")] = None,
    rival: Annotated[list[str] | None, typer.Option(
        "--rival", help="A drafter to measure with them, not trained here: directory or Hub id. Repeatable.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Display name; default: compare.")] = None,
    settings: Set = None,
    follow: Watch = True,
    local: Annotated[bool, typer.Option("--local", help="Start a control plane here if none is running.")] = False,
    server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """Train a drafter of every family for a target, from one capture and on the same rows, and rank them together with
    n-gram look-up, rivals and no drafter.

    This is `eyrie train` with sweep.families, rivals, one checkpoint for each family, and nothing served: --file and
    --set change that. The best family is tuned and proven as well.
    """
    screen = Screen(as_json=as_json)
    job = comparison(build_job(file=file, name=name, target=target, data=data or (), settings=settings or ()),
                     families.split(",") if families else (), rival or ())
    created = submit(absolute_paths(job, server, target, data or ()), server, screen, follow, local)
    if follow and not as_json:
        with connect(server) as client:
            screen.out.print(tables.leaderboard_table(client.leaderboard(job_id=created.id)))


def submit(job: JobSpec, server: str, screen: Screen, follow: bool, local: bool) -> Job:
    """Create the job, and with `follow` watch it to its end. Raises JobFailed or JobCancelled.

    local   start a control plane on this machine if none is running
    """
    if local:
        start_local(server, screen)
    with connect(server) as client:
        created = client.create_job(job)
        with suppress(NotFound):  # the target's sizes are not known here
            screen.note(tables.planned_words(client.planned(created.id)))
        if not follow:
            screen.show(created, f"Job {created.id} accepted. Follow it: eyrie watch {created.id}")
            return created
        screen.note(f"job {created.id} accepted; Ctrl-C stops watching, not the job")
        follow_job(client, created.id, screen)
    return created


def start_local(server: str, screen: Screen) -> None:
    """Start a control plane on this machine unless one is running. Raises EyrieError when it does not start."""
    try:
        with connect(server) as client:
            client.jobs(limit=1)
            return
    except EyrieError:
        screen.note(f"no control plane at {server}: starting one here (eyrie down ends it)")
    address = urlsplit(server)
    if not is_local(server):
        raise InvalidInput(f"--local cannot start a control plane at {server}", "leave --server out")
    # By name, not by import: the client verbs stand below the operator and do not know it.
    started = subprocess.run([sys.executable, "-m", "eyrie_operator.command", "up", "--detach", "--port",
                              str(address.port or DEFAULT_PORT)], stdout=subprocess.DEVNULL, check=False)
    if started.returncode != 0:
        raise typer.Exit(started.returncode)


def follow_job(client: Client, job_id: str, screen: Screen) -> None:
    """Watch to the end and print a summary. Raises JobFailed or JobCancelled."""
    try:
        job = watch.watch(client, job_id, screen)
    except KeyboardInterrupt:
        screen.note(f"\nno longer watching; the job continues. eyrie watch {job_id} again, or eyrie cancel {job_id}")
        raise
    if screen.as_json:
        screen.line(job, "")
    else:
        endpoint = None
        if job.status.endpoint is not None:
            with suppress(EyrieError):  # what the job came to is known without it
                endpoint = client.endpoint(job.status.endpoint)
        screen.out.print(watch.closing_words(job, endpoint), soft_wrap=True, markup=False, highlight=False)
    watch.verdict(job)


@app.command()
@server_verb
def plan(client: Client, screen: Screen, target: Target = None, data: Data = None, file: File = None,
         settings: Set = None, measure: Annotated[bool, typer.Option(
             "--measure", help="Time the rounds that the needed tau is computed from, by a job of minutes: a drafter "
                               "of one training step in the job's engine.")] = False) -> None:
    """Estimate a job's tokens, bytes and hours, with all assumptions, without running it.

    Ends with 78 where memory or disk are too small for such a job, which would be refused.
    """
    job = build_job(file=file, target=target, data=data or (), settings=settings or ())
    job = absolute_paths(job, client.base_url, target, data or ())
    smaller = measurement(job) if measure else None
    planned = client.plan(job)
    if smaller is not None and planned.possible:
        planned = timed(client, smaller, planned, screen)
    screen.show(planned, tables.plan_view(planned))
    if not planned.possible:
        raise typer.Exit(GpuTooSmall.exit_code)


def timed(client: Client, job: JobSpec, planned: Plan, screen: Screen) -> Plan:
    """The plan with the needed tau from the timed rounds of `job` (`spec.measurement`). Raises JobFailed or
    JobCancelled."""
    created = client.create_job(job)
    screen.note(f"job {created.id} times the rounds; its drafter is not trained, so what it decides means nothing")
    watch.verdict(watch.watch(client, created.id, screen.for_progress()))
    report = client.report(created.id)
    assert report.tune is not None  # of a job that succeeded
    return planned.model_copy(update={"needed_tau": report.tune.needed_tau, "timed_by": created.id})


@app.command()
@server_verb
def jobs(
    client: Client, screen: Screen,
    phase: Annotated[str | None, typer.Option("--phase", help="Only jobs in this phase, e.g. Running.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200)] = 20,
    cursor: Annotated[str | None, typer.Option("--cursor", help="next_cursor of the previous page.")] = None,
) -> None:
    """List jobs, newest first."""
    page = client.jobs(phase=phase, limit=limit, cursor=cursor)
    screen.show(page, tables.jobs_table(page.items, utc_now()))
    if page.next_cursor:
        screen.note(f"more: eyrie jobs --cursor {page.next_cursor}")


@app.command()
@server_verb
def alerts(client: Client, screen: Screen) -> None:
    """List what needs a person: failures, decisions, drift, quotas, what waits; each with what to do."""
    listed = client.alerts()
    screen.show(listed, tables.alerts_view(listed.items, utc_now()))


@app.command("attention", hidden=True)
@verb
def attention() -> None:
    """The name of `eyrie alerts` before 0.2."""
    raise InvalidInput("`eyrie attention` is called `eyrie alerts` since 0.2", "run `eyrie alerts`")


@app.command("job")
@server_verb
def job_(client: Client, screen: Screen, job: JobId) -> None:
    """Show one job: stages, time left, conditions, decision."""
    left = None
    shown = find_job(client, job)
    if shown.status.phase == "Running" and not screen.as_json:
        with suppress(NotFound):  # it has no plan
            left = client.planned_and_actual(shown.id).time_left
    screen.show(shown, tables.job_view(shown, utc_now(), left))


app.command("show", hidden=True)(job_)


@app.command()
@server_verb
def calibrate(client: Client, screen: Screen, job: JobId) -> None:
    """Compare a job's plan with what its stages took, and print the machine's rates for later plans."""
    compared = client.planned_and_actual(find_job(client, job).id)
    screen.show(compared, tables.calibration_view(compared))


@app.command("watch")
@server_verb
def watch_(client: Client, screen: Screen, job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Default: the newest job.")] = None) -> None:
    """Watch a job until it ends, across restarts of the server."""
    if job is None:
        newest = client.jobs(limit=1).items
        if not newest:
            raise InvalidInput("there are no jobs", "start one: eyrie train --target <model> --data <chats.jsonl>")
        job = newest[0].id
    follow_job(client, find_job(client, job).id, screen)


@app.command()
@server_verb
def logs(
    client: Client, screen: Screen, job: JobId,
    stage: Annotated[str | None, typer.Option("--stage", help="Default: the running, failed or last stage.")] = None,
    key: Annotated[str, typer.Option("--key", help="Candidate or checkpoint.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep streaming.")] = False,
) -> None:
    """Show the log of a stage."""
    shown = find_job(client, job)
    started = [status for status in shown.status.stages if status.started_at is not None]
    matching = [status for status in started if stage in (None, status.stage) and (not key or status.key == key)]
    if not matching:
        known = ", ".join(f"{status.stage}{' --key ' + status.key if status.key else ''}" for status in started)
        raise InvalidInput(f"job {shown.id} has no log of stage {stage or 'any'} {key}".rstrip(),
                           f"it has: {known}" if known else "no stage has started yet")
    picked = next((status for state in ("Failed", "Running") for status in matching if status.state == state),
                  matching[-1])
    for line in client.logs(shown.id, picked.stage, key=picked.key, follow=follow):
        screen.line({"stage": picked.stage, "key": picked.key, "line": line}, Text(printable(line)))


@app.command()
@server_verb
def events(
    client: Client, screen: Screen, job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep streaming until the job ends.")] = False,
) -> None:
    """Show a job's events, in order."""
    for event in client.events(find_job(client, job).id, follow=follow):
        screen.line(event, tables.event_text(event))


@app.command()
@server_verb
def metrics(
    client: Client, screen: Screen, job: JobId,
    name: Annotated[str | None, typer.Option("--name", help="Only this series, e.g. loss.")] = None,
) -> None:
    """Show a job's metrics: loss, acceptance per position, theoretical speed-up."""
    series = client.metrics(find_job(client, job).id, name=name)
    screen.show({"items": series}, tables.series_table(series))


@app.command()
@server_verb
def leaderboard(
    client: Client, screen: Screen,
    target: Annotated[str | None, typer.Option("--target", help="Only drafters of this target.")] = None,
    family: Annotated[str | None, typer.Option("--family", help="Only drafters of this family.")] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Rank by this suite alone.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Rank by this one alone.")] = None,
    engine: Annotated[EngineKind | None, typer.Option("--engine", help="Rank by measurements in this one.")] = None,
) -> None:
    """List measured checkpoints, best first."""
    if target is not None and is_local(client.base_url):
        target = _absolute(target, "--target", TargetNotFound)  # as a job has it
    entries = client.leaderboard(target=target, family=family, suite=suite, temperature=temperature, engine=engine)
    screen.show({"items": entries}, tables.leaderboard_table(entries))


@app.command("plots")
@server_verb
def plots_(
    client: Client, screen: Screen,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id, its beginning, or its name.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="The figures of this endpoint instead.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Directory for the files.")] = Path("plots"),
    kind: Annotated[str, typer.Option("--format", help="svg or png.")] = "svg",
    theme: Annotated[str, typer.Option("--theme", help="light or dark.")] = "light",
) -> None:
    """Write the figures of a job or an endpoint, those of its console page, as SVG or PNG files."""
    if (job is None) == (endpoint is None):
        raise InvalidInput("give a job or --endpoint, and not both", "eyrie plots JOB, or eyrie plots --endpoint NAME")
    for flag, value, known in (("--format", kind, ("svg", "png")), ("--theme", theme, ("light", "dark"))):
        if value not in known:
            raise InvalidInput(f"{flag} {value!r} is not known", f"give {' or '.join(known)}")
    figures = client.endpoint_figures(endpoint) if endpoint is not None else plots.figures_of_job(
        client, find_job(client, job or "").id)
    files = plots.write_figures(figures, out, cast(plots.Format, kind), cast(Any, theme)) if figures else []
    screen.show({"files": [str(file) for file in files]}, "\n".join(map(str, files)) or (
        "no figures yet: those of a job appear while it trains and when the benchmark, tune and prove stages finish, "
        "those of an endpoint with its first window of acceptance"))


@app.command("open")
@server_verb
def open_console(
    client: Client, screen: Screen,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id or name. Default: the home page.")] = None,
) -> None:
    """Open the console in a browser, and print its address."""
    path = "/" if job is None else f"/console/jobs/{find_job(client, job).id}"
    url = client.base_url + path
    opened = not screen.as_json and webbrowser.open(url)
    screen.show({"url": url}, url if opened else f"{url}  (no browser here: open it yourself)")


@app.command()
@server_verb
def cancel(client: Client, screen: Screen, job: JobId) -> None:
    """Stop a job. Its finished stages are kept."""
    ended = client.cancel(find_job(client, job).id)
    screen.show(ended, f"Job {ended.id} is {ended.status.phase.lower()}. Go on later: eyrie retry {ended.id}")


@app.command()
@server_verb
def retry(
    client: Client, screen: Screen, job: JobId,
    from_stage: Annotated[StageName | None, typer.Option(
        "--from", help="Run again from this stage: its output and that of the later stages is removed.")] = None,
    follow: Watch = False,
) -> None:
    """Resume a failed or cancelled job after its last finished stage, or run an ended one again from a stage."""
    again = client.retry(find_job(client, job).id, from_stage)
    if follow:
        follow_job(client, again.id, screen)
        return
    screen.show(again, f"Job {again.id}: attempt {again.status.attempt}. Follow it: eyrie watch {again.id}")


@app.command()
@server_verb
def delete(
    client: Client, screen: Screen, job: JobId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a job and its files."""
    doomed = find_job(client, job)
    if not yes and not screen.as_json:
        typer.confirm(f"Delete job {doomed.id} and every file it wrote?", abort=True)
    is_deleted = client.delete(doomed.id)
    words = "deleted." if is_deleted else "is being cancelled and will be deleted once it has stopped."
    screen.show({"id": doomed.id, "deleted": is_deleted}, f"Job {doomed.id} {words}")


@app.command()
@server_verb
def storage(
    client: Client, screen: Screen,
    clean: Annotated[bool, typer.Option("--clean/--dry-run", help="Remove the removable files.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Include failed jobs.")] = False,
    home: Annotated[Path | None, typer.Option("--home", help="The server's home. Default: EYRIE_HOME.")] = None,
    store: Annotated[str | None, typer.Option("--store", help="An artifact store (s3://...) instead.")] = None,
) -> None:
    """List the files jobs hold, and which may be removed: captured states, training states, unused checkpoints.

    Without files here, and without options about them, the server says what it has measured.
    """
    from eyrie_api.artifacts import storage_usage
    from eyrie_api.artifacts.open_store import open_store
    from eyrie_api.cli.storage import all_jobs, measured_by, storage_view

    root = home or Settings.from_env().home
    if store is None and not (root / "jobs").is_dir():
        if home is not None or clean or failed:
            raise InvalidInput(f"no jobs below {root}",
                               "run it where the server's files are, with --home, or give --store")
        usage, last = measured_by(client)
        screen.note(f"measured by the server at {last.measured_at.astimezone():%Y-%m-%d %H:%M:%S}"
                    + (f"; not everything is counted: {last.incomplete}" if last.incomplete else ""))
        result = {"removed_bytes": None, **usage.model_dump(mode="json"), "incomplete": last.incomplete}
        screen.show(result, storage_view(usage, None, {}))
        return
    place = open_store(store) if store is not None else None
    jobs, served = all_jobs(client), storage_usage.served_by(client.endpoints().items)
    files = storage_usage.files_in_home(root) if place is None else storage_usage.files_in_store(place)
    read = partial(storage_usage.read_in_home, root) if place is None else place.read
    readers = storage_usage.reused_by(storage_usage.that_have_not("Regenerated", jobs), read)
    states = storage_usage.states_of(storage_usage.reused_by(storage_usage.that_have_not("Captured", jobs), read))
    facts = {job.id: storage_usage.JobFacts(job.status.phase, job.status.best.checkpoint if job.status.best else None)
             for job in jobs}
    usage = storage_usage.plan_removal(storage_usage.group_files(files), facts, served,
                                       storage_usage.read_by(jobs) | states, failed_too=failed)
    freed = None
    if clean:
        freed = (storage_usage.remove_from_home(root, usage) if place is None
                 else storage_usage.remove_from_store(place, usage))
    result = {"removed_bytes": freed, **usage.model_dump(mode="json"), "incomplete": None, "answers_read_by": readers}
    screen.show(result, storage_view(usage, freed, readers))


@endpoints_app.callback(invoke_without_command=True)
def endpoints(context: typer.Context, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """List endpoints; promote, roll back, switch off and on."""
    if context.invoked_subcommand is None:
        endpoints_list(server=server, as_json=as_json)


EndpointName = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Name of the endpoint.")]


def _show_endpoint(screen: Screen, endpoint: Endpoint) -> None:
    screen.show(endpoint, tables.endpoint_view(endpoint, utc_now()))


@endpoints_app.command("list")
@server_verb
def endpoints_list(client: Client, screen: Screen) -> None:
    """List endpoints."""
    listed = client.endpoints()
    screen.show(listed, tables.endpoints_table(listed.items))


@endpoints_app.command("show")
@server_verb
def endpoints_show(client: Client, screen: Screen, endpoint: EndpointName) -> None:
    """Show one endpoint and its revisions."""
    _show_endpoint(screen, client.endpoint(endpoint))


@endpoints_app.command("promote")
@server_verb
def endpoints_promote(
    client: Client, screen: Screen, endpoint: EndpointName,
    job: Annotated[str, typer.Option("--job", help="Job whose drafter to serve.")],
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Default: the job's best.")] = None,
) -> None:
    """Serve a job's drafter (blue/green)."""
    _show_endpoint(screen, client.promote(endpoint, job_id=find_job(client, job).id, checkpoint=checkpoint))


@endpoints_app.command("rollback")
@server_verb
def endpoints_rollback(
    client: Client, screen: Screen, endpoint: EndpointName,
    revision: Annotated[int | None, typer.Option("--to", "--revision", help="Default: the previous one.")] = None,
) -> None:
    """Serve an earlier revision again."""
    _show_endpoint(screen, client.rollback(endpoint, revision=revision))


app.command("rollback")(endpoints_rollback)


@endpoints_app.command("history")
@server_verb
def endpoints_history(
    client: Client, screen: Screen, endpoint: EndpointName,
    kind: Annotated[str | None, typer.Option("--kind", help="decided, activated, drift, window, ...")] = None,
    windows: Annotated[bool, typer.Option("--windows", help="Show every window, not only the latest.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 200,
) -> None:
    """Show an endpoint's history: decisions, changes, observations and their actors."""
    if kind is not None and kind not in get_args(HistoryKind):
        raise InvalidInput(f"--kind {kind!r} is not known", f"give one of {', '.join(get_args(HistoryKind))}")
    read = client.history(endpoint, limit=limit, kind=cast("HistoryKind | None", kind))
    every = windows or kind == "window"
    screen.show(read, tables.history_view(read, endpoint, client.base_url, every_window=every))


@endpoints_app.command("off")
@server_verb
def endpoints_off(client: Client, screen: Screen, endpoint: EndpointName) -> None:
    """Stop an endpoint's engine; the URL stays reserved."""
    _show_endpoint(screen, client.off(endpoint))


@endpoints_app.command("on")
@server_verb
def endpoints_on(client: Client, screen: Screen, endpoint: EndpointName) -> None:
    """Start an endpoint's engine again."""
    _show_endpoint(screen, client.on(endpoint))


@app.command()
@verb
def chat(
    message: Annotated[str | None, typer.Argument(help="One message; default: interactive, or stdin.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="Default: the only one that is on.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Any OpenAI-compatible base URL, including /v1.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="With --url: the model name to send.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system prompt; none is sent otherwise.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, max=4.0)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(
        "--max-tokens", min=1, help="Longest answer. Default: the engine's.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same output.")] = None,
    server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """Chat with an endpoint; shows tokens per second and acceptance length."""
    screen = Screen(as_json=as_json)
    if url is None:
        with connect(server) as client:
            picked = chatting.pick_endpoint(client.endpoints().items, endpoint)
        url, model = picked.url or "", model or picked.model
    if model is None:
        raise InvalidInput("--url needs --model", "GET <url>/models lists what it serves")
    settings = chatting.ChatSettings(base_url=url, model=model, temperature=temperature, max_tokens=max_tokens,
                                     seed=seed)
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None:
        chatting.say(settings, [*opening, {"role": "user", "content": message}], screen)
        return
    if as_json:
        raise InvalidInput("--json needs one message", "eyrie chat --json 'your message'")
    chatting.talk(settings, opening, screen)


# Last, so that --help begins with what everybody runs.
app.command("whoami")(access.whoami)
app.command("audit")(access.audit)

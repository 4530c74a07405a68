"""The `eyrie` command: the client's commands, and those that run a control plane.

    eyrie up [--detach]    start the control plane of this machine; its home holds database, jobs, log and `plane.json`
    eyrie down             stop it; jobs stop at their next pause point and resume at the next `up`
    eyrie doctor           what is damaged in a home, and its repair
    eyrie worker           further chore workers, where the broker is Redis
    eyrie serve-api        on a cluster: the API server alone, as one of any number of replicas
    eyrie migrate          migrate the database, or wait until it is migrated (--check)
    eyrie operator         on a cluster: reconcile DrafterJobs and DraftEndpoints; of several replicas one leads
    eyrie demo             the whole job on the shipped target, from one REST call to an endpoint with a drafter
    eyrie certify          drafters that were trained elsewhere: checked, measured, judged, for CI
    eyrie publish          a job's drafter with card and results, into a directory or a repository of the Hub
    eyrie export           a job's decision for other servers: launch lines, Kubernetes objects
    eyrie data push        data files of this machine into a bucket that jobs read
    eyrie load-test        load tests of servers, compared

The last one, and `certify` of two running servers, are programs of the workers and run as child processes: this process
never imports torch.

`up` on a home whose control plane is running prints its URL and succeeds.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from eyrie_api.cli import spec
from eyrie_api.cli.commands import File, Set, Target, absolute_paths, app, find_job
from eyrie_api.cli.verbs import Json, RunningPlane, Screen, Server, running_plane, verb
from eyrie_api.client import DEFAULT_SERVER, Client
from eyrie_api.contract.engine import EngineKind
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict, InvalidInput
from eyrie_api.processes import free_port
from eyrie_api.settings import DEFAULT_PORT, Settings
from eyrie_operator.cli.detached import check_port, claim, start_detached, stop_plane

Home = Annotated[Path | None, typer.Option("--home", envvar="EYRIE_HOME", help="Where state lives. Default: .eyrie")]


def settings_for(home: Path | None, host: str | None, port: int | None) -> Settings:
    """Settings from EYRIE_* variables, overridden by flags."""
    settings = Settings.from_env()
    changes = {"home": home, "host": host, "port": port}
    return settings.model_copy(update={name: value for name, value in changes.items() if value is not None})


@app.command()
@verb
def up(
    home: Home = None,
    host: Annotated[str | None, typer.Option("--host", help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help=f"Default {DEFAULT_PORT}.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")] = False,
    as_json: Json = False,
) -> None:
    """Start the control plane on this machine."""
    screen = Screen(as_json=as_json)
    settings = settings_for(home, host, port)
    if settings.port == 0:
        settings = settings.model_copy(update={"port": free_port(settings.host)})
    already = running_plane(settings.home)
    if already is not None:
        show_address(already, screen, already=True)
        return
    if detach:
        show_address(start_detached(settings), screen)
        return
    # With a web server and a database, which the other commands do not need: seconds of imports.
    from eyrie_operator.control_plane import run

    check_port(settings.host, settings.port)
    plane = RunningPlane(pid=os.getpid(), url=f"http://{settings.host}:{settings.port}", home=settings.home)
    # Race: uvicorn drains on SIGTERM and then raises the signal again. The default action would end this process before
    # runs and engines are stopped; SystemExit unwinds the context managers that stop them.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    with claim(settings.home, plane.url):
        show_address(plane, screen)
        run(settings)


def show_address(plane: RunningPlane, screen: Screen, *, already: bool = False) -> None:
    # The printed command must work unchanged: --server is added only when the URL is not the default.
    where = "" if plane.url == DEFAULT_SERVER else f" --server {plane.url}"
    words = (f"{'Already up' if already else 'Eyrie is up'}: {plane.url}  (console; API: {plane.url}/docs; state: "
             f"{plane.home})\nNext: eyrie train --target <model> --data <chats.jsonl>{where}")
    screen.show({"url": plane.url, "pid": plane.pid, "home": str(plane.home.absolute()), "already": already}, words)


@app.command()
@verb
def down(home: Home = None, as_json: Json = False) -> None:
    """Stop the control plane of this machine. Jobs stop at their next pause point and resume at the next `up`."""
    settings = settings_for(home, None, None)
    plane = running_plane(settings.home)
    if plane is not None:
        stop_plane(plane)
    elif (settings.home / "eyrie.db").exists() or settings.database_url is not None:
        from eyrie_operator.control_plane import stop_orphans

        stop_orphans(settings)
    words = f"Stopped {plane.url}." if plane else f"No control plane is running on {settings.home}."
    Screen(as_json=as_json).show({"stopped": plane is not None, "home": str(settings.home.absolute())}, words)


@app.command()
@verb
def doctor(
    home: Home = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be, with the control plane down.")] = False,
    digests: Annotated[bool, typer.Option("--digests", help="Read every file of every stage as well.")] = False,
    as_json: Json = False,
) -> None:
    """Find what is damaged or does not belong together: database, job directories, manifests, records.

    With EYRIE_CLUSTER_PROFILE, files of jobs are those of its work area. Ends with 74 when something is found and not
    repaired.
    """
    from eyrie_api.database.engine import Database
    from eyrie_api.http.job_files import JobFiles
    from eyrie_operator import doctor as examination

    screen, settings = Screen(as_json=as_json), settings_for(home, None, None)
    if settings.database_url is None and not (settings.home / "eyrie.db").is_file():
        raise ArtifactMissing(f"{settings.home} holds no eyrie.db", "name the home (--home DIR), or restore a backup")
    if repair and running_plane(settings.home) is not None:
        raise Conflict("the control plane of this home is running", "stop it first: eyrie down")
    database = Database(settings.resolved_database_url)
    try:
        store = JobFiles.of(settings).store
        defects = list(examination.examine(examination.Home(settings.home.absolute(), database, digests, store)))
    finally:
        database.close()
    if repair:
        defects = [examination.repair(settings.home.absolute(), defect) for defect in defects]
    left = [defect for defect in defects if not defect.repaired]
    words = [f"{'repaired' if defect.repaired else defect.reason}  {defect.where}\n  {defect.message}"
             + ("" if defect.repaired else f"\n  hint: {defect.hint}") for defect in defects]
    where = settings.home if store is None else store.url
    more = "" if digests else "; --digests reads every file as well"
    words.append(f"{len(defects)} findings, {len(defects) - len(left)} repaired" if defects else
                 f"{where}: nothing is damaged{more}")
    screen.show([defect.model_dump() for defect in defects], "\n".join(words))
    if left:
        raise typer.Exit(ArtifactCorrupt.exit_code)


@app.command()
@verb
def worker(
    home: Home = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=256, help="Chores at once.")] = 2,
) -> None:
    """Run chores from the Redis of EYRIE_BROKER_URL, on the database of a control plane."""
    from eyrie_operator.control_plane import work

    work(settings_for(home, None, None), concurrency)


@app.command("serve-api")
@verb
def serve_api(
    home: Home = None,
    host: Annotated[str | None, typer.Option("--host", help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help=f"Default {DEFAULT_PORT}.")] = None,
) -> None:
    """Serve the API on a shared database and Redis, without chores. On one machine use `up`."""
    from eyrie_api.http.replica import serve

    serve(settings_for(home, host, port))


@app.command()
@verb
def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; wait until it is migrated.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for the database.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Migrate the tables of EYRIE_DATABASE_URL; tables of a newer Eyrie stay unchanged."""
    from eyrie_api.database.engine import Database
    from eyrie_api.http.replica import await_tables, migrate_when_there
    from eyrie_operator.doctor import check_whole

    database = Database(settings_for(None, None, None).resolved_database_url)
    check_whole(database)
    state = (await_tables if check else migrate_when_there)(database, timeout)
    Screen(as_json=as_json).show({"tables": state}, f"The tables are {state}.")


@app.command("operator")
@verb
def operate(
    home: Home = None,
    namespace: Annotated[list[str] | None, typer.Option(
        "--namespace", "-n", envvar="EYRIE_OPERATOR_NAMESPACES", help="Namespace to watch; repeatable. Default: all."
    )] = None,
    mirror: Annotated[str | None, typer.Option(
        "--mirror-namespace", envvar="EYRIE_OPERATOR_MIRROR_NAMESPACE",
        help="Namespace for mirrors of jobs posted to the REST API. Default: no mirrors.")] = None,
    runs: Annotated[str | None, typer.Option(
        "--runs-namespace", envvar="EYRIE_OPERATOR_RUNS_NAMESPACE",
        help="Namespace of the pods of runs, listed to show why they wait for a node. Default: kubeflow.namespace of "
             "the cluster profile, else the watched ones.")] = None,
    project: Annotated[list[str] | None, typer.Option(
        "--project", envvar="EYRIE_OPERATOR_PROJECTS", metavar="NAMESPACE=PROJECT",
        help="Project of a namespace's objects; repeatable. Default: the project `default`.")] = None,
    lease: Annotated[str, typer.Option(
        "--lease", envvar="EYRIE_OPERATOR_LEASE", help="[NAMESPACE/]NAME of the Lease; one per installation."
    )] = "eyrie-operator",
    host: Annotated[str, typer.Option("--host", help="For probes and metrics.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", envvar="EYRIE_OPERATOR_PORT", min=0, max=65535)] = 8080,
    lease_s: Annotated[float, typer.Option(
        "--lease-seconds", min=1.0, max=300.0, help="Lease duration: time until a failed leader is replaced.")] = 15.0,
) -> None:
    """Reconcile the custom resources of a cluster with the database of EYRIE_DATABASE_URL."""
    from eyrie_operator.cluster import program
    from eyrie_operator.cluster.leases import timings_of

    where, _, name = lease.rpartition("/")
    options = program.Options(
        lease_namespace=where or program.own_namespace(), lease_name=name,
        namespaces=program.parse_namespaces(namespace or ()), mirror_namespace=mirror,
        runs_namespace=runs, projects=program.parse_projects(project or ()), host=host, port=port,
        timings=timings_of(lease_s))
    raise typer.Exit(program.run(settings_for(home, None, None), options))


@app.command()
@verb
def demo(
    short: Annotated[bool, typer.Option("--short", help="Fewer conversations, steps and prompts: for CI.")] = False,
    keep: Annotated[bool, typer.Option("--keep/--stop", help="Keep the endpoint running, or stop a demo.")] = True,
    engine: Annotated[EngineKind, typer.Option(
        help="The engine that regenerates, benchmarks, tunes, proves and serves.")] = "embedded",
    target: Annotated[str, typer.Option(
        help="The target: the shipped one, or a directory or Hub id. The questions are always the shipped ones.")]
    = "quickstart",
    as_json: Json = False,
) -> None:
    """Run a whole job on this machine: train, measure, promote, serve. `--stop` stops its processes."""
    from eyrie_operator.cli import demo as show

    screen = Screen(as_json=as_json)
    if not keep:
        show.stop(show.HOME, screen)
        return
    show.play(show.HOME, screen, show.demo_job(short, engine, target))


# The program defines options and help.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("load-test", context_settings=_PASS_THROUGH, add_help_option=False)
def load_test(context: typer.Context) -> None:
    """Load-test OpenAI-compatible servers and compare them. Options: `eyrie load-test --help`."""
    raise typer.Exit(run_program("eyrie_workers.measure.load", context.args))


def run_program(module: str, arguments: Sequence[str]) -> int:
    """Run a program of the workers as a child with this terminal; returns its exit code."""
    # Ctrl-C is delivered to the child too, which shuts down; this process only waits. A handler rather than SIG_IGN,
    # which the child would inherit.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    child = subprocess.Popen([sys.executable, "-m", module, *arguments])
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    code = child.wait()
    return code if code >= 0 else 128 - code


@app.command("load", context_settings=_PASS_THROUGH, add_help_option=False, hidden=True)
@verb
def load() -> None:
    """The name of `eyrie load-test` before 0.2."""
    raise InvalidInput("`eyrie load` is called `eyrie load-test` since 0.2",
                       "run `eyrie load-test` with the same options")


@app.command()
@verb
def certify(
    drafters: Annotated[list[str] | None, typer.Argument(
        metavar="[DRAFTER]...", help="Directories or Hub ids of drafters that were trained elsewhere.")] = None,
    target: Target = None,
    prompts: Annotated[list[str] | None, typer.Option(
        "--prompts", help="File of `messages` or `prompt` rows, s3:// or https:// URL, Hub id. Repeatable. Default: "
                          "the shipped ones, for the shipped target.")] = None,
    file: File = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Hub branch, tag or commit of the target.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Serve the best, if it passes every check.")] = False,
    settings: Set = None,
    check_only: Annotated[bool, typer.Option(
        "--check-only", help="Measure nothing: whether SGLang and vLLM serve the directories as they are. Exits with "
                             "65 if not.")] = False,
    context: Annotated[int | None, typer.Option(
        "--context", min=1, help="With --check-only: context length to serve it with.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="With --check-only: do not read the target's weights.")] = False,
    off: Annotated[str | None, typer.Option(
        "--off", metavar="URL", help="With --drafted: compare two running servers (SGLang, vLLM, Eyrie's own), this "
                                     "one without a drafter. --set takes fields of prove and promotion.")] = None,
    drafted: Annotated[str | None, typer.Option(
        "--drafted", metavar="URL", help="The running server with the drafter.")] = None,
    model: Annotated[str | None, typer.Option(
        "--model", help="With --off: model name in requests. Default: the only one that a server lists.")] = None,
    api_key_env: Annotated[str | None, typer.Option(
        "--api-key-env", help="With --off: environment variable with the API key of both servers.")] = None,
    home: Home = None,
    server: Annotated[str | None, typer.Option(
        "--server", envvar="EYRIE_SERVER", help="Address of the control plane. Default: that of --home, which is "
                                                "started for the run where none runs.")] = None,
    as_json: Json = False,
) -> None:
    """Measure drafters that were trained elsewhere: load, benchmark, tune, prove, judge.

    Exits with 0 where the best drafter is certified and faster, 3 certified and not faster, 4 not lossless, 5
    undecided, 65 or 66 where drafters, target or prompts are refused.
    """
    from eyrie_operator.cli import certify as certification
    from eyrie_operator.cli import files

    screen = Screen(as_json=as_json)
    if check_only:
        if not files.check(drafters or (), target, context, screen, fast=fast):
            raise typer.Exit(files.EXIT_DEFECTIVE)
        return
    running = {"--off": off, "--drafted": drafted, "--model": model, "--api-key-env": api_key_env}
    if any(running.values()):
        others = {"DRAFTER": drafters, "--target": target, "--file": file, "--revision": revision, "--dtype": dtype,
                  "--promote": promote, "--context": context, "--fast": fast, "--server": server}
        raise typer.Exit(certify_running(running, others, prompts or (), settings or (), as_json=as_json))
    if context is not None or fast:
        raise InvalidInput(f"{'--fast' if fast else '--context'} is given without --check-only, which it belongs to",
                           "add --check-only, or leave it out")
    where = DEFAULT_SERVER if server is None else server
    job = spec.certification(spec.build_job(
        file=file, target=target, revision=revision, dtype=dtype, drafters=drafters or (), prompts=prompts or (),
        settings=settings or ()), promote=promote)
    result = certification.certify(absolute_paths(job, where, target), server, settings_for(home, None, None).home,
                                   screen)
    screen.show(result, certification.words(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def certify_running(running: Mapping[str, str | None], others: Mapping[str, object], prompts: Sequence[str],
                    settings: Sequence[str], *, as_json: bool) -> int:
    """`eyrie certify --off URL --drafted URL`; returns the exit code. Raises InvalidInput."""
    if running["--off"] is None or running["--drafted"] is None:
        raise InvalidInput("two running servers are compared, and one of --off and --drafted is missing",
                           "give both: --off URL of the server without a drafter, --drafted URL of the one with it")
    foreign = [name for name, value in others.items() if value]
    if foreign:
        raise InvalidInput(f"{', '.join(foreign)} does not belong to --off and --drafted, which serve what they serve",
                           "leave it out, or leave --off and --drafted out")
    if not prompts:
        raise InvalidInput("no prompts were given", "give --prompts FILE; quickstart names the shipped ones")
    for setting in settings:
        if setting.partition(".")[0] not in ("prove", "promotion"):
            raise InvalidInput(f"--set {setting!r}: with two running servers only fields of prove and promotion apply",
                               "write it like --set prove.concurrencies=[1,8]")
    job = spec.build_job(target="running", drafters=("running",), settings=settings)
    return run_program("eyrie_workers.measure.running_servers", [
        *(part for name, value in running.items() if value is not None for part in (name, value)),
        *(part for path in prompts for part in ("--prompts", path)), "--prove", job.prove.model_dump_json(),
        "--promotion", job.promotion.model_dump_json(), *(["--json"] if as_json else [])])


@app.command("check-drafter", context_settings=_PASS_THROUGH, add_help_option=False, hidden=True)
@verb
def check_drafter() -> None:
    """The name of `eyrie certify --check-only` before 0.2."""
    raise InvalidInput("`eyrie check-drafter` is `eyrie certify --check-only` since 0.2",
                       "run `eyrie certify --check-only` with the same options")


@app.command("publish")
@verb
def publish(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of the job.")],
    to: Annotated[str | None, typer.Option("--to", metavar="ORG/NAME", help="Repository of the Hub.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Directory, in the same form.")] = None,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Default: the tuned one, or the best.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Create the repository public, not private.")] = False,
    server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """Publish a job's drafter with its card and its measured results."""
    from eyrie_operator.cli import files

    if (to is None) == (out is None):
        raise InvalidInput("give one of --to and --out", "--to org/name writes to the Hub, --out DIR to a directory")
    with Client(server) as client, tempfile.TemporaryDirectory() as scratch:
        trained = find_job(client, job)
        directory = out or Path(scratch) / "drafter"
        name = files.publish(client, trained.id, checkpoint, directory)
        where = str(directory) if to is None else files.upload(
            directory, to, public=public, message=f"{name} of job {trained.spec.name or trained.id}, with its results")
    Screen(as_json=as_json).show({"checkpoint": name, "job": trained.id, "published": where},
                                 Text(f"{name}, its card and its results are in {where}"))


@app.command("export")
@verb
def export(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id or name of the job.")],
    to: Annotated[Path | None, typer.Option(
        "--to", metavar="DIR", help="Write the files here. Default: show the launch lines.")] = None,
    drafter: Annotated[str | None, typer.Option(
        "--drafter", metavar="DIR|ORG/NAME", help="Where the drafter is served from, as after `eyrie publish`. "
                                                  "Default: where the job has it.")] = None,
    hardware: Annotated[str | None, typer.Option(
        "--hardware", help="Accelerator of the lines: h100, mi300x, cpu and others. Default: serve.hardware_profile of "
                           "the job, else h100.")] = None,
    engine: Annotated[Literal["sglang", "vllm"] | None, typer.Option(
        "--engine", help="Engine of the cluster's objects. Default: sglang; vllm where it alone serves it.")] = None,
    server: Server = DEFAULT_SERVER, as_json: Json = False,
) -> None:
    """The decision for your own servers: launch lines of SGLang and vLLM, Deployment, KServe, llm-d.

    A job whose drafter failed a check exports the target without a drafter, and says why.
    """
    from eyrie_operator.cli import export as exporting

    with Client(server) as client:
        decided = find_job(client, job)
        report = client.report(decided.id)
        model, target_config, drafter_config = exporting.read_configs(client, decided, report)
    result = exporting.export(decided, report, target_config, drafter_config, target_model=model, drafter_at=drafter,
                              hardware=hardware, engine=engine)
    if to is not None:
        exporting.write(result, to)
    Screen(as_json=as_json).show(result, exporting.words(result, to))


data_app = typer.Typer(no_args_is_help=True, help="Conversations for jobs.")
app.add_typer(data_app, name="data")


@data_app.command("push")
@verb
def push_data(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File, directory, or pattern in quotes.")],
    to: Annotated[str | None, typer.Option("--to", metavar="URL", help="s3://bucket/prefix. Default: data/NAME below "
                                                                       "EYRIE_ARTIFACTS_URL.")] = None,
    as_json: Json = False,
) -> None:
    """Upload data files into a bucket that jobs read; repeated, it sends what is missing."""
    from eyrie_operator.cli import files

    screen = Screen(as_json=as_json)
    done = files.push(path, to, screen)
    screen.show(done, Text(f"{done.files} files, {done.bytes / 1e6:.1f} MB, are in the bucket; {done.sent} were sent. "
                           f"In a job: data.sources[].path: {done.path}"))


def main() -> None:
    app(prog_name="eyrie")


if __name__ == "__main__":
    main()

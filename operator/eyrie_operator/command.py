"""The whole `eyrie` command: the client verbs, and what starts and ends a control plane on this machine.

    eyrie up [--detach]    the control plane here; its home holds the database, the jobs, a log and who runs it
    eyrie down             ends it; jobs stop at a safe line and go on at the next `up`
    eyrie worker           more hands for its chores, where the broker is Redis
    eyrie serve-api        on a cluster: the API server alone, one of any number
    eyrie migrate          makes the database's tables, or waits until another has (--check)
    eyrie operator         on a cluster: drives DrafterJobs and DraftEndpoints; of several replicas one leads
    eyrie demo             the whole job on the shipped target, from one REST call to a faster endpoint
    eyrie check-drafter    whether a drafter directory is what SGLang and vLLM will serve
    eyrie compare          drafter families trained and measured side by side: which is right for a target
    eyrie load             servers under load, compared

The last two are programs of the workers, started as children: this one never loads torch.

`up` on a home that is already up says where and ends well.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from eyrie_api.cli.commands import app
from eyrie_api.cli.screen import Screen
from eyrie_api.cli.verbs import Json, verb
from eyrie_api.client import DEFAULT_SERVER
from eyrie_api.processes import free_port
from eyrie_api.settings import DEFAULT_PORT, Settings
from eyrie_operator.cli.detached import (
    Plane,
    check_port,
    claim,
    running_plane,
    start_detached,
    stop_plane,
)

Home = Annotated[Path | None, typer.Option("--home", envvar="EYRIE_HOME", help="Where state lives. Default: .eyrie")]


def settings_for(home: Path | None, host: str | None, port: int | None) -> Settings:
    """EYRIE_* variables, with the flags over them."""
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
    from eyrie_operator.control_plane import run

    screen = Screen(as_json=as_json)
    settings = settings_for(home, host, port)
    if settings.port == 0:
        settings = settings.model_copy(update={"port": free_port(settings.host)})
    already = running_plane(settings.home)
    if already is not None:
        tell_up(already, screen, already=True)
        return
    if detach:
        tell_up(start_detached(settings), screen)
        return
    check_port(settings.host, settings.port)
    plane = Plane(pid=os.getpid(), url=f"http://{settings.host}:{settings.port}", home=settings.home)
    # uvicorn drains on SIGTERM and then raises it again. The default action would end us there and then, before runs
    # and engines are stopped in order; SystemExit unwinds.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    with claim(settings.home, plane.url):
        tell_up(plane, screen)
        run(settings)


def tell_up(plane: Plane, screen: Screen, *, already: bool = False) -> None:
    """Where it is, and what to do next."""
    # The next line must work as it stands: name the server only when it is not where the command looks by itself.
    where = "" if plane.url == DEFAULT_SERVER else f" --server {plane.url}"
    words = (f"{'Already up' if already else 'Eyrie is up'}: {plane.url}  (API and docs: {plane.url}/docs; state: "
             f"{plane.home})\nNext: eyrie train --target <model> --data <chats.jsonl>{where}")
    screen.show({"url": plane.url, "pid": plane.pid, "home": str(plane.home.absolute()), "already": already}, words)


@app.command()
@verb
def down(home: Home = None, as_json: Json = False) -> None:
    """End the control plane on this machine. Jobs stop at a safe line and go on at the next `up`."""
    from eyrie_operator.control_plane import stop_orphans

    settings = settings_for(home, None, None)
    plane = running_plane(settings.home)
    if plane is not None:
        stop_plane(plane)
    elif (settings.home / "eyrie.db").exists() or settings.database_url is not None:
        stop_orphans(settings)
    words = f"Ended {plane.url}." if plane else f"No control plane runs on {settings.home}; nothing of it is left."
    Screen(as_json=as_json).show({"stopped": plane is not None, "home": str(settings.home.absolute())}, words)


@app.command()
@verb
def worker(
    home: Home = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=256, help="Chores at once.")] = 2,
) -> None:
    """Take chores from the Redis of EYRIE_BROKER_URL, beside the control plane on the same database."""
    from eyrie_operator.celery_app import work

    work(settings_for(home, None, None), concurrency)


@app.command("serve-api")
@verb
def serve_api(
    home: Home = None,
    host: Annotated[str | None, typer.Option("--host", help="Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help=f"Default {DEFAULT_PORT}.")] = None,
) -> None:
    """Answer the API over a shared database and Redis, and do nothing else. On one machine use `up`."""
    from eyrie_api.http.replica import serve

    serve(settings_for(home, host, port))


@app.command()
@verb
def migrate(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; wait until another has done it.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for the database.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Bring the tables of EYRIE_DATABASE_URL up to date; those of a newer Eyrie stay as they are."""
    from eyrie_api.database.engine import Database
    from eyrie_api.http.replica import await_tables, migrate_when_there

    settings = settings_for(None, None, None)
    standing = (await_tables if check else migrate_when_there)(Database(settings.resolved_database_url), timeout)
    Screen(as_json=as_json).show({"tables": standing}, f"The tables are {standing}.")


@app.command("operator")
@verb
def operate(
    home: Home = None,
    namespace: Annotated[list[str] | None, typer.Option(
        "--namespace", "-n", envvar="EYRIE_OPERATOR_NAMESPACES", help="To watch; may be repeated. Default: all."
    )] = None,
    mirror: Annotated[str | None, typer.Option(
        "--mirror-namespace", envvar="EYRIE_OPERATOR_MIRROR_NAMESPACE",
        help="Show jobs posted to the REST API as DrafterJobs here. Default: not at all.")] = None,
    project: Annotated[list[str] | None, typer.Option(
        "--project", envvar="EYRIE_OPERATOR_PROJECTS", metavar="NAMESPACE=PROJECT",
        help="Whose a namespace's objects are; may be repeated. Default: the project `default`.")] = None,
    lease: Annotated[str, typer.Option(
        "--lease", envvar="EYRIE_OPERATOR_LEASE", help="[NAMESPACE/]NAME of the Lease; one per installation."
    )] = "eyrie-operator",
    host: Annotated[str, typer.Option("--host", help="For probes and metrics.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", envvar="EYRIE_OPERATOR_PORT", min=0, max=65535)] = 8080,
    lease_s: Annotated[float, typer.Option(
        "--lease-seconds", min=1.0, max=300.0, help="How long a silent leader is waited for.")] = 15.0,
) -> None:
    """Drive the custom resources of a cluster over the database of EYRIE_DATABASE_URL."""
    from eyrie_operator.cluster import program
    from eyrie_operator.cluster.leases import timings_of

    where, _, name = lease.rpartition("/")
    options = program.Options(
        lease_namespace=where or program.own_namespace(), lease_name=name,
        namespaces=program.parse_namespaces(namespace or ()), mirror_namespace=mirror,
        projects=program.parse_projects(project or ()), host=host, port=port, timings=timings_of(lease_s))
    raise typer.Exit(program.run(settings_for(home, None, None), options))


@app.command()
@verb
def demo(
    short: Annotated[bool, typer.Option("--short", help="Fewer conversations, steps and prompts: for CI.")] = False,
    keep: Annotated[bool, typer.Option("--keep/--stop", help="Leave the endpoint on, or end a demo.")] = True,
    as_json: Json = False,
) -> None:
    """The whole job on the shipped target: trained, measured, promoted, serving. `--stop` ends what it left."""
    from eyrie_operator.cli import demo as show

    screen = Screen(as_json=as_json)
    if not keep:
        show.stop(show.HOME, screen)
        return
    show.play(show.HOME, screen, short=short)


# These programs have the options and their help: here are only their names.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Put OpenAI-compatible servers under load and compare them. `eyrie load --help` has the options."""
    raise typer.Exit(run_child("eyrie_workers.load", context.args))


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def compare(context: typer.Context) -> None:
    """Train drafters of several families for a target and measure them side by side. `eyrie compare --help`."""
    raise typer.Exit(run_child("eyrie_workers.comparison", context.args))


def run_child(module: str, arguments: Sequence[str]) -> int:
    """Run a program of the workers with our streams until it ends; its exit code, 128 + n when signal n ended it."""
    # Ctrl-C reaches the child too, which ends in order; we only wait for it. (An ignored signal would be inherited.)
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    child = subprocess.Popen([sys.executable, "-m", module, *arguments])
    signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
    code = child.wait()
    return code if code >= 0 else 128 - code


@app.command("check-drafter")
@verb
def check_drafter(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An exported drafter.")],
    target: Annotated[str | None, typer.Option("--target", help="Its target: path, Hub id, quickstart.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Tokens it shall be served with.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Do not read the target's weights.")] = False,
    as_json: Json = False,
) -> None:
    """Would SGLang and vLLM serve this drafter as it was trained? Ends with 65 when not."""
    from eyrie_operator.cli import drafter_check

    asked = [str(directory), *(["--target", target] if target else []), *(["--fast"] if fast else []),
             *(["--context", str(context)] if context else [])]
    document = drafter_check.run_check(asked)
    Screen(as_json=as_json).show(document, drafter_check.verdict(document))
    if drafter_check.is_defective(document):
        raise typer.Exit(drafter_check.EXIT_DEFECTIVE)


def main() -> None:
    """Entry of `python -m eyrie_operator.command`."""
    app(prog_name="eyrie")


if __name__ == "__main__":
    main()

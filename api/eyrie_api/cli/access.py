"""The verbs about access: whoami, keys, projects, audit, webhooks. Each is a call of the REST API, rendered.

What is shown once (a key, a webhook's secret) goes to stdout alone on its line, so that it can be piped into a file.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast, get_args

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from eyrie_api.cli.verbs import Screen, project_verb, server_verb
from eyrie_api.client import Client
from eyrie_api.contract.access import (
    Action,
    CreatedWebhook,
    CreateKey,
    CreateMember,
    CreateProject,
    CreateWebhook,
    Project,
    Quotas,
    Role,
    WebhookEvent,
)
from eyrie_api.contract.rules import first_problem
from eyrie_api.errors import InvalidInput

keys_app = typer.Typer(no_args_is_help=True, help="API keys: create, list, rotate, revoke.")
projects_app = typer.Typer(no_args_is_help=True, help="Projects, their members and quotas.")
webhooks_app = typer.Typer(no_args_is_help=True, help="URLs to which a project's events are posted.")
ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of the project.")]


@project_verb
def whoami(client: Client, screen: Screen) -> None:
    """Show the authenticated identity and its permissions."""
    me = client.whoami()
    roles = ", ".join(f"{role} in {'every project' if name == '*' else name}" for name, role in me.roles.items())
    narrowed = "" if me.scopes is None else f", narrowed to {', '.join(me.scopes)}"
    screen.show(me, Text(f"{me.subject}: {roles or 'no role anywhere'}{narrowed}"))


@keys_app.command("create")
@project_verb
def keys_create(
    client: Client, screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Display name.")],
    role: Annotated[str, typer.Option("--role", help="viewer, operator or admin.")] = "operator",
    scope: Annotated[list[str] | None, typer.Option("--scope", help="Restrict it, e.g. jobs:read; repeatable.")] = None,
    days: Annotated[float | None, typer.Option(
        "--days", min=0.0, help="Days until it expires; 0: never. Default 90, or until your own key ends.")] = None,
    everywhere: Annotated[bool, typer.Option("--everywhere", help="In every project.")] = False,
) -> None:
    """Create an API key, which is shown only once."""
    scopes = None if scope is None else tuple(cast(Action, _one_of(action, Action, "--scope")) for action in scope)
    wanted = _checked(CreateKey, name=name, role=_one_of(role, Role, "--role"), scopes=scopes, everywhere=everywhere,
                      **({} if days is None else {"expires_in_days": days or None}))
    created = client.create_key(wanted)
    key = created.key
    _show_once(screen, {"key": key}, created.secret,
               f"key {key.id} of {key.project or 'every project'}: shown only once; use it as EYRIE_TOKEN")


@keys_app.command("list")
@project_verb
def keys_list(client: Client, screen: Screen) -> None:
    """List keys, newest first."""
    listed = client.keys()
    rows = [(key.id, key.name, key.project or "*", key.role, _day(key.expires_at), _day(key.last_used_at),
             "revoked" if key.revoked_at is not None else "") for key in listed.items]
    screen.show(listed, _table(("ID", "NAME", "PROJECT", "ROLE", "EXPIRES", "LAST USED", ""), rows,
                               "No keys yet: eyrie keys create <name>"))


@keys_app.command("revoke")
@server_verb
def keys_revoke(client: Client, screen: Screen, key: Annotated[str, typer.Argument(metavar="KEY", help="Id.")]) -> None:
    """Revoke a key; every server refuses it within seconds."""
    ended = client.revoke_key(key)
    screen.show(ended, Text(f"Key {ended.id} ({ended.name}) is revoked."))


@keys_app.command("rotate")
@server_verb
def keys_rotate(
    client: Client, screen: Screen,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id.")],
    overlap_s: Annotated[float, typer.Option("--overlap-s", min=0.0, help="Seconds the old one stays valid.")] = 0.0,
) -> None:
    """Replace a key by a new one with the same permissions."""
    created = client.rotate_key(key, overlap_s)
    _show_once(screen, {"key": created.key}, created.secret, f"key {created.key.id} replaces {key}; shown only once")


@projects_app.command("list")
@server_verb
def projects_list(client: Client, screen: Screen) -> None:
    """List the projects in which you have a role, with their usage."""
    listed = client.projects()
    screen.show(listed, _projects(listed.items))


@projects_app.command("create")
@server_verb
def projects_create(
    client: Client, screen: Screen, name: ProjectName,
    description: Annotated[str, typer.Option("--description", help="Text that lists of projects show.")] = "",
) -> None:
    """Create a project."""
    created = client.create_project(_checked(CreateProject, name=name, description=description))
    screen.show(created, _projects([created]))


@projects_app.command("quotas")
@server_verb
def projects_quotas(
    client: Client, screen: Screen, name: ProjectName,
    jobs: Annotated[int | None, typer.Option("--jobs", min=0, help="Jobs that have not ended.")] = None,
    endpoints: Annotated[int | None, typer.Option("--endpoints", min=0, help="Endpoints that are on.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs that jobs request at one time.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=0, help="Replicas of endpoints.")] = None,
    priority_class: Annotated[list[str] | None, typer.Option(
        "--priority-class", help="Kubernetes PriorityClass that may be named; repeatable.")] = None,
    per_minute: Annotated[int | None, typer.Option(
        "--requests-per-minute", min=1, help="Limit of the whole project.")] = None,
) -> None:
    """Replace a project's quotas; omitted ones are unlimited."""
    wanted = _checked(Quotas, max_jobs=jobs, max_endpoints=endpoints, max_gpus=gpus, max_replicas=replicas,
                      priority_classes=tuple(priority_class) if priority_class else None,
                      requests_per_minute=per_minute)
    changed = client.set_quotas(name, wanted)
    screen.show(changed, _projects([changed]))


@projects_app.command("members")
@server_verb
def projects_members(client: Client, screen: Screen, name: ProjectName) -> None:
    """List the members of a project."""
    listed = client.members(name)
    rows = [(str(member.id), member.kind, member.value, member.role, member.issuer) for member in listed.items]
    screen.show(listed, _table(("ID", "KIND", "VALUE", "ROLE", "ISSUER"), rows, "No members yet."))


@projects_app.command("add-member")
@server_verb
def projects_add_member(
    client: Client, screen: Screen, name: ProjectName,
    role: Annotated[str, typer.Option("--role", help="viewer, operator or admin.")],
    subject: Annotated[str | None, typer.Option("--subject", help="`sub` of their tokens.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="A group in their tokens.")] = None,
    issuer: Annotated[str | None, typer.Option("--issuer", help="Default: the one the server trusts.")] = None,
) -> None:
    """Give a role to a subject or a group."""
    if (subject is None) == (group is None):
        raise InvalidInput("give one of --subject and --group",
                           "eyrie projects add-member chat --role viewer --group engineers")
    wanted = _checked(CreateMember, kind="group" if subject is None else "subject", value=subject or group,
                      role=_one_of(role, Role, "--role"), issuer=issuer)
    member = client.add_member(name, wanted)
    screen.show(member, Text(f"{member.kind} {member.value} is {member.role} in {member.project}."))


@projects_app.command("remove-member")
@server_verb
def projects_remove_member(
    client: Client, screen: Screen, name: ProjectName, member: Annotated[int, typer.Argument(
        metavar="MEMBER", help="Its number in `eyrie projects members`.")],
) -> None:
    """Remove a member."""
    client.remove_member(name, member)
    screen.show({"id": member, "removed": True}, Text(f"Member {member} of {name} is removed."))


@project_verb
def audit(
    client: Client, screen: Screen,
    actor: Annotated[str | None, typer.Option("--actor", help="e.g. key:<id>")] = None,
    done: Annotated[str | None, typer.Option("--verb", help="e.g. job.create")] = None,
    thing: Annotated[str | None, typer.Option("--object", help="e.g. job/<id>")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 50,
    before: Annotated[int | None, typer.Option("--before", help="next_before of the previous page.")] = None,
) -> None:
    """Show the audit log, newest first: changes and refused attempts."""
    page = client.audit(actor=actor, verb=done, thing=thing, before=before, limit=limit)
    rows = [(entry.time.astimezone().strftime("%m-%d %H:%M:%S"), entry.actor, entry.verb, entry.object,
             entry.project or "-", entry.outcome) for entry in page.items]
    screen.show(page, _table(("TIME", "WHO", "DID", "TO", "PROJECT", "OUTCOME"), rows, "Nothing yet."))
    if page.next_before is not None:
        screen.note(f"older ones: eyrie audit --before {page.next_before}")


@webhooks_app.command("create")
@project_verb
def webhooks_create(
    client: Client, screen: Screen,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address to which events are posted.")],
    event: Annotated[list[str] | None, typer.Option("--event", help="e.g. job.failed; default: all.")] = None,
) -> None:
    """Post a project's events to a URL. The signing secret is shown only once."""
    events = [cast(WebhookEvent, _one_of(name, WebhookEvent, "--event")) for name in event or ()]
    wanted = _checked(CreateWebhook, url=url, **({"events": tuple(events)} if events else {}))
    _show_webhook(client.create_webhook(wanted), screen)


@webhooks_app.command("list")
@project_verb
def webhooks_list(client: Client, screen: Screen) -> None:
    """List webhooks."""
    listed = client.webhooks()
    rows = [(hook.id, hook.project, hook.url, ", ".join(hook.events), hook.disabled_reason or "on")
            for hook in listed.items]
    screen.show(listed, _table(("ID", "PROJECT", "URL", "EVENTS", "STATE"), rows, "No webhooks yet."))


WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id.")]


@webhooks_app.command("rotate")
@server_verb
def webhooks_rotate(client: Client, screen: Screen, webhook: WebhookId) -> None:
    """Replace a webhook's secret. The new one, shown only once, signs every attempt from now on."""
    _show_webhook(client.rotate_webhook(webhook), screen)


@webhooks_app.command("delete")
@server_verb
def webhooks_delete(client: Client, screen: Screen, webhook: WebhookId) -> None:
    """Delete a webhook with its deliveries."""
    client.delete_webhook(webhook)
    screen.show({"id": webhook, "deleted": True}, Text(f"Webhook {webhook} is deleted."))


@webhooks_app.command("deliveries")
@server_verb
def webhooks_deliveries(client: Client, screen: Screen, webhook: WebhookId) -> None:
    """List a webhook's latest deliveries."""
    listed = client.deliveries(webhook)
    rows = [(delivery.id, delivery.event, delivery.state, str(delivery.attempts),
             str(delivery.status or delivery.error or "-"), _day(delivery.next_at)) for delivery in listed.items]
    screen.show(listed, _table(("ID", "EVENT", "STATE", "ATTEMPTS", "ANSWER", "NEXT"), rows,
                               "Nothing was sent yet."))


@webhooks_app.command("ping")
@server_verb
def webhooks_ping(client: Client, screen: Screen, webhook: WebhookId) -> None:
    """Send a test event; a successful one enables the webhook again."""
    sent = client.ping_webhook(webhook)
    screen.show(sent, Text(f"Sent {sent.id}. How it went: eyrie webhooks deliveries {webhook}"))


def _show_webhook(made: CreatedWebhook, screen: Screen) -> None:
    _show_once(screen, {"webhook": made.webhook}, made.secret,
               f"webhook {made.webhook.id} of {made.webhook.project}; its secret is shown only once")


def _show_once(screen: Screen, made: dict[str, Any], secret: str, note: str) -> None:
    if screen.as_json:
        screen.show({**made, "secret": secret}, "")
        return
    screen.line(None, Text(secret))
    screen.note(note)


def _one_of(value: str, kind: Any, flag: str) -> str:
    if value not in get_args(kind):
        raise InvalidInput(f"{flag} {value!r} is not known", f"give one of {', '.join(get_args(kind))}")
    return value


def _checked(model: Any, **fields: Any) -> Any:
    """A validated request. Raises InvalidInput with the contract's message."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(first_problem(error), "see --help") from None


def _projects(projects: Sequence[Project]) -> Table | Text:
    rows = [(project.name, _of(project.live_jobs, quotas.max_jobs), _of(project.live_endpoints, quotas.max_endpoints),
             _of(project.live_gpus, quotas.max_gpus), _of(project.live_replicas, quotas.max_replicas),
             "any" if quotas.priority_classes is None else ", ".join(quotas.priority_classes) or "none",
             str(quotas.requests_per_minute or "-"), project.description)
            for project in projects for quotas in (project.quotas,)]
    return _table(("NAME", "JOBS", "ENDPOINTS", "GPUS", "REPLICAS", "PRIORITY CLASSES", "REQUESTS/MIN", "DESCRIPTION"),
                  rows, "You are in no project.")


def _of(used: int, most: int | None) -> str:
    return str(used) if most is None else f"{used} of {most}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> Table | Text:
    if not rows:
        return Text(nothing)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _day(time: Any) -> str:
    return "-" if time is None else str(time.astimezone().strftime("%Y-%m-%d %H:%M"))

"""Two projects and everyone who must not reach the other one: `make campaign-tenancy`.

The routes are those that the application serves; one that the table of `tests.api.access.test_walk` lacks is a finding,
so that a new route cannot be forgotten. Callers: admin, operator and viewer of another project, viewer of the project
itself, and keys of its admin that were revoked, rotated and have expired. Each walks every route with ids of both
projects, ids altered, three ways to name a project, as JSON and as an event stream, and other methods. Rules:

- another project's caller reads nothing: no 2xx where the path names its objects, and none of its words in a response;
- no caller of another project, no viewer and no dead key changes a row or a file of the project;
- a dead key gets 401 on all but the probes.

Custom resources are another way in: `tenancy_resources` applies objects of the other project's namespaces. A gateway
has no callers to tell apart, and is not part of this.

    python -m benchmarks.campaigns.tenancy [--seed 1] [--seconds 60] [--postgres] [--out FILE]
"""

import contextlib
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from benchmarks.campaigns.live_servers import scratch
from benchmarks.campaigns.report import Campaign, options
from benchmarks.campaigns.tenancy_resources import apply_objects
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.tables import Base
from eyrie_api.http.middleware import MUTATING, PROBES
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from eyrie_pipelines.processes import wait_until
from tests.api.access.harness import KEYS, TOKEN, Harness, Tenant, two_projects
from tests.api.access.test_walk import CHANGING_NOTHING, OPEN, ROUTES, SIGN_IN, body_of, filled
from tests.servers import postgres
from tests.servers.processes import Session, Unavailable, private_dir

STREAM_PARTS = 3
_NOT_STATE = {"audit", "idempotency", "outbox"}
"""Tables that refused requests, or reads, may change."""

_NOT_COLUMNS = {"last_used_at"}
WORDS = {"a word of north", "printed by north", "north-c1", "north-person", "http://127.0.0.1:9/north"}
"""Of north's rows and files."""


@dataclass(frozen=True)
class Caller:
    """Who asks, and what is expected of the answers."""

    name: str
    secret: str
    is_dead: bool = False
    is_inside: bool = False
    """A member of the project that is to be protected."""


def make_callers(harness: Harness) -> list[Caller]:
    """Keys of every kind that must not read or change north, or only read it."""
    def key(tenant: Tenant, role: str, **options: Any) -> tuple[str, str]:
        made = harness.ask(TOKEN, "POST", KEYS, json={"name": role, "role": role, **options},
                           headers={"Eyrie-Project": tenant.project})
        assert made.status_code == 201, made.text
        return made.json()["key"]["id"], made.json()["secret"]

    north, south = harness.a, harness.b
    revoked, rotated, expired = key(north, "admin"), key(north, "admin"), key(north, "admin", expires_in_days=1e-6)
    ended = [harness.ask(TOKEN, "POST", f"{KEYS}/{revoked[0]}/revoke"),
             harness.ask(TOKEN, "POST", f"{KEYS}/{rotated[0]}/rotate", json={"overlap_s": 0.0})]
    assert [one.status_code // 100 for one in ended] == [2, 2], [one.text for one in ended]
    dead = [Caller("revoked", revoked[1], is_dead=True), Caller("rotated", rotated[1], is_dead=True),
            Caller("expired", expired[1], is_dead=True)]
    for one in dead:
        def refused(secret: str = one.secret) -> bool:
            return harness.ask(secret, "GET", "/v1alpha1/whoami").status_code == 401

        assert wait_until(refused, 30.0), f"the {one.name} key goes on"
    return [Caller("another project's admin", south.secret),
            Caller("another project's operator", key(south, "operator")[1]),
            Caller("another project's viewer", key(south, "viewer")[1]),
            Caller("viewer", key(north, "viewer")[1], is_inside=True), *dead]


def state_of(database: Database, tenant: Tenant, home: Path) -> frozenset[str]:
    """Rows and files that are the project's."""
    marks = {tenant.project, *(value for name, value in tenant.ids.items()
                               if name not in ("stage", "path", "member_id"))}
    rows = set()
    with database.reading() as session:
        for table in Base.metadata.sorted_tables:
            if table.name not in _NOT_STATE:
                for row in session.execute(select(table)).mappings():
                    values = {name: value for name, value in row.items() if name not in _NOT_COLUMNS}
                    if any(str(value) in marks for value in values.values()):
                        rows.add(f"{table.name}: {values}")
    files = {f"{path}: {path.read_bytes()!r}" for path in (home / "jobs" / tenant.ids["job_id"]).rglob("*")
             if path.is_file()}
    return frozenset(rows | files)


def walk(campaign: Campaign, harness: Harness, database: Database, home: Path, until_s: float) -> dict[str, Any]:
    """Send every caller along every route until the campaign is `until_s` old, at least once."""
    rng = random.Random(campaign.seed)
    north = harness.a
    callers, before = make_callers(harness), state_of(database, north, home)
    counted: Counter[str] = Counter()
    rounds = 0
    while rounds == 0 or campaign.elapsed_s < until_s:
        for caller in callers:
            for (method, path), (_kind, body) in ROUTES.items():
                asked, headers = _variant(rng, method, path, harness, rounds)
                sent = rng.choice((method, method, method, *MUTATING)) if rounds else method
                status, said = _ask(harness, caller.secret, sent, asked, body_of(body, north.ids), headers)
                counted[f"{caller.name}: {status}"] += 1
                facts = {"caller": caller.name, "method": sent, "path": asked, "headers": headers, "status": status}
                is_open = path in PROBES or (path in (*OPEN, *SIGN_IN) and sent == "GET")
                if caller.is_dead and status != 401 and not is_open:
                    campaign.add_finding("a dead key is refused", **facts)
                if not caller.is_inside:
                    found = [word for word in WORDS if word in said and word not in asked]
                    named = any(north.ids[name] in asked
                                for name in ("job_id", "name", "key_id", "webhook_id"))
                    if found or (named and status < 300):
                        campaign.add_finding("nothing of another project is read", **facts, words=found)
                elif sent in MUTATING and status < 300 and path not in CHANGING_NOTHING:
                    campaign.add_finding("a viewer changes nothing", **facts)
                if sent in MUTATING and (after := state_of(database, north, home)) != before:
                    campaign.add_finding("nothing of the project is changed", **facts, rows=sorted(after ^ before)[:4])
                    before = after
        rounds += 1
    return {"routes": len(ROUTES), "callers": len(callers), "rounds": rounds, "requests": counted.total(),
            "answers": dict(sorted(counted.items())), "rows and files compared": len(before)}


def _variant(rng: random.Random, method: str, path: str, harness: Harness,
             rounds: int) -> tuple[str, dict[str, str]]:
    """Path and headers; the first round names what exists, plainly."""
    north, south = harness.a, harness.b
    ids = dict(north.ids)
    headers = {"Accept": "application/json"}
    if rounds:
        for name in ids:
            kind = rng.randrange(6)
            if kind == 0:
                ids[name] = south.ids[name]
            elif kind == 1:
                ids[name] = rng.choice((ids[name] + "%20", ids[name].upper(), f"..%2f{ids[name]}", f"x/../{ids[name]}",
                                        ids[name] + "/", f"{south.ids[name]}%00{ids[name]}"))
        if rng.random() < 0.5:
            headers["Eyrie-Project"] = rng.choice(("north", "south", "NORTH", "north,south", "*", "default"))
        if rng.random() < 0.3:
            headers["Accept"] = "text/event-stream"
        if rng.random() < 0.3:
            headers["Idempotency-Key"] = "the same for all"
    asked = filled(path, ids)
    if rounds and rng.random() < 0.3:
        named = rng.choice(("project=north", "project=south&project=north", "project=*"))
        asked += ("&" if "?" in asked else "?") + named
    return asked, headers


def _ask(harness: Harness, secret: str, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
    """Status and body; of an event stream, its first parts, since it goes on."""
    sent = {"Authorization": f"Bearer {secret}", **headers}
    said = ""
    with harness.http.stream(method, path, json=body if method in ("POST", "PUT") else None, headers=sent) as answer:
        for number, part in enumerate(answer.iter_text()):
            said += part
            if number == STREAM_PARTS and "text/event-stream" in answer.headers.get("content-type", ""):
                break
    return answer.status_code, said


def attack(campaign: Campaign, path: Path, url: str | None, until_s: float) -> dict[str, Any]:
    """Both ways in, on one database: the routes, then custom resources for a quarter of the time."""
    home = path / "home"
    home.mkdir(parents=True)
    settings = Settings(home=home, database_url=url, rate_limit_per_minute=10_000_000, sse_heartbeat_s=0.1,
                        sse_poll_s=0.02)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    served = {(method, route.path) for route in create_app(settings, database=database).state.routes
              for method in route.methods - {"HEAD"}}
    for missing in sorted(served - set(ROUTES)):
        campaign.add_finding("every route is walked", route=missing)
    with two_projects(settings, database) as harness:
        share = (until_s - campaign.elapsed_s) / 4
        figures = walk(campaign, harness, database, home, until_s - share)
        figures |= apply_objects(campaign, settings, database, harness, WORDS,
                                 lambda: state_of(database, harness.a, home), until_s)
    database.close()
    return figures


def main() -> int:
    """Run the campaign."""
    parser = options("tenancy", "Callers that must not read or change a project, along every route.", 60.0)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL too, half of the time")
    wanted = parser.parse_args()
    campaign = Campaign("tenancy", wanted.seed, wanted.seconds, wanted.out)
    figures: dict[str, Any] = {}
    with scratch("tenancy") as path, contextlib.ExitStack() as stack:
        first_s = wanted.seconds / (2 if wanted.postgres else 1)
        figures["SQLite"] = attack(campaign, path / "sqlite", None, first_s)
        if wanted.postgres:
            stack.callback(Session().end)
            try:
                server = postgres.start(private_dir())
            except Unavailable as reason:
                figures["PostgreSQL"] = f"left out: {reason}"
            else:
                figures["PostgreSQL"] = attack(campaign, path / "postgres", server.url(server.create()),
                                               wanted.seconds)
    return campaign.finish(figures)


if __name__ == "__main__":
    sys.exit(main())

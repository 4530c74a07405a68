"""Evil requests against API server, gateway and embedded engine: `make campaign-fuzz`.

Every part is a process. Routes come from the application, so that a new one is included. A request is a valid one with
something evil in its path, query, headers, body or bytes (`evil_values`), or, with the chance STRUCTURED, a valid one
with one evil field in its document, which passes the first checks. Rules:

- no status of 500 or more, and no connection closed without an answer;
- an answer within LIMIT_S, at the second attempt where the first took longer: other work on the machine slows single
  ones down;
- an error is problem details from the API, and an OpenAI error from the engine, and JSON in the strict sense;
- at the end the parts answer as at the beginning, and their memory has not grown by more than GROWTH_MIB.

The part `files` submits and plans jobs whose target, drafter or data is a mutated directory (`mutated_files`), with the
same rules. The part `redirects` reads files of a web server that redirects (`redirects`).

With `--schemathesis PROGRAM` the API's own document is tested too, in a process: all checks of schemathesis but
`positive_data_acceptance` (rules between fields and on what exists are not in a JSON schema) and `use_after_free`
(deleting a job that runs is a request to stop it; it is there until it has stopped), and without events and logs, whose
streams do not end.

    python -m benchmarks.campaigns.fuzz [--seed 1] [--seconds 120] [--parts api,files,redirects,gateway,engine]
        [--requests N] [--directories N] [--postgres] [--schemathesis PROGRAM] [--out FILE]
"""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

import httpx

from benchmarks.campaigns.evil_values import HEADERS, dump, evil_bytes, evil_segment, mutated
from benchmarks.campaigns.live_servers import Part, api_server, endpoint, scratch
from benchmarks.campaigns.mutated_files import mutate_data, mutate_drafter, mutate_target
from benchmarks.campaigns.raw_http import Answer, send
from benchmarks.campaigns.redirects import attack_redirects
from benchmarks.campaigns.report import Campaign, options
from eyrie_api.contract.status import Problem
from eyrie_api.database.engine import Database
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.samples import job_body
from tests.servers import postgres
from tests.servers.processes import Session, private_dir
from tests.tiny import tiny_target
from tests.workers.drafters import published_forms

LIMIT_S, _GIVE_UP_S = 5.0, 60.0
GROWTH_MIB = 95
"""Of resident memory after the first tenth of the requests, which fills caches: 100 MB."""

STRUCTURED = 0.4
QUERIES = ("limit", "cursor", "after", "before", "phase", "label", "name", "target", "key", "stage", "project", "kind",
           "follow", "tail", "digest", "tuned", "best")
CHAT = {"model": "tiny", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"], "stream": False, "n": 1,
        "ignore_eos": False, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "temperature": 0, "stop": "x", "stream": True,
              "logprobs": 1, "stop_token_ids": [3]}
BODIES: dict[str, Any] = {
    "/v1alpha1/jobs": job_body(name="n", labels={"team": "search"}, serve={"endpoint": "e"},
                               sweep={"axes": [{"field": "train.learning_rate", "values": [0.001, 0.0003]}]},
                               train={"ttt_length": 3, "learning_rate": 0.001}, rivals=[{"method": "off"}]),
    "/v1alpha1/plans": job_body(sweep={"axes": [{"field": "train.learning_rate", "values": [0.001]}]}),
    "/v1alpha1/keys": {"name": "k", "role": "viewer", "expires_in_s": 3600},
    "/v1alpha1/projects": {"name": "p"},
    "/v1alpha1/projects/{project}/quotas": {"max_jobs": 1, "max_endpoints": 2},
    "/v1alpha1/projects/{project}/members": {"kind": "group", "value": "x", "role": "viewer",
                                             "issuer": "https://issuer.example"},
    "/v1alpha1/webhooks": {"url": "https://hooks.example/x", "events": ["job.succeeded"]},
    "/v1alpha1/endpoints/{name}/promote": {"job_id": "j", "checkpoint": "c"},
    "/v1alpha1/endpoints/{name}/rollback": {"revision": 1},
}
ENGINE_ROUTES = (("POST", "/v1/chat/completions", CHAT), ("POST", "/v1/completions", COMPLETION),
                 ("GET", "/v1/models", None), ("GET", "/v1/models/{name}", None), ("GET", "/health", None),
                 ("GET", "/metrics", None))
Route = tuple[str, str, Any]


@dataclass(frozen=True)
class Request:
    """As it is sent."""

    method: str
    target: bytes
    headers: dict[str, bytes]
    body: bytes
    structured: bool
    """Whether it is valid but for one field of its document."""


@dataclass
class Bound:
    """A share of a campaign: it ends after so many requests, or when its time is over."""

    campaign: Campaign
    seconds: float
    most: float
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.campaign.elapsed_s

    def share(self, done: int) -> float:
        """What is done of it, 1 at its end."""
        return max(done / self.most, (self.campaign.elapsed_s - self.began) / self.seconds)


def routes_of_api(home: Path) -> list[Route]:
    """Method, path template and a valid body of every route that the application serves."""
    settings = Settings(home=home)
    database = Database(settings.resolved_database_url)
    try:
        served = create_app(settings, database=database).state.routes
        return sorted(((method, route.path, BODIES.get(route.path) if method in ("POST", "PUT") else None)
                       for route in served for method in route.methods), key=lambda one: one[:2])
    finally:
        database.close()


def make_request(rng: random.Random, routes: Sequence[Route], known: Sequence[str]) -> Request:
    """One evil request; `known` are ids that exist."""
    if rng.random() < STRUCTURED:
        method, template, valid = rng.choice([route for route in routes if route[2] is not None])
        path = re.sub(r"{[^}]*}", lambda _: rng.choice(known), template)
        return Request(method, path.encode(), {"Content-Type": b"application/json"}, dump(mutated(valid, rng)), True)
    method, template, valid = rng.choice(routes)
    weights = {"path": 0.25, "query": 0.25, "headers": 0.3, "body": 0.7, "bytes": 0.05, "method": 0.03}
    evil = {place for place, chance in weights.items() if rng.random() < chance}

    def segment(_found: re.Match[str]) -> str:
        return evil_segment(rng) if "path" in evil or not known else rng.choice(known)

    path = re.sub(r"{[^}]*}", segment, template)
    if "path" in evil and rng.random() < 0.1:
        path += "/" + evil_segment(rng)
    if "query" in evil:
        count = rng.choice((1, 1, 2, 5, 400))
        path += "?" + "&".join(f"{rng.choice(QUERIES)}={evil_segment(rng)}" for _ in range(count))[:60_000]
    headers: dict[str, bytes] = {}
    if "headers" in evil:
        for name in rng.sample(sorted(HEADERS), rng.choice((1, 1, 2, 4))):
            headers[name] = rng.choice(HEADERS[name])
    body = b""
    if valid is not None:
        headers = {"Content-Type": b"application/json", **headers}
        body = dump(mutated(valid, rng, rng.choice((1, 1, 2, 6))) if "body" in evil else valid)
        body = evil_bytes(body, rng) if "bytes" in evil else body
    if "method" in evil:
        method = rng.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "HEAD"))
    return Request(method, re.sub(r"[\x00-\x20\x7f-\U0010ffff]", "%20", path).encode(), headers, body, False)


def broken_rule(part: Part, method: str, headers: dict[str, bytes], answer: Answer) -> str | None:
    """The rule that the answer breaks; None when it breaks none."""
    if answer.status >= 500:
        # An unknown transfer coding is the one thing that HTTP itself answers with 501 (RFC 9112, section 6.1).
        return None if answer.status == 501 and "Transfer-Encoding" in headers else f"status {answer.status}"
    if answer.status == 0:
        return "no answer"
    if method == "HEAD" or answer.status < 400:
        if answer.headers.get("content-type", "").startswith("application/json") and method != "HEAD":
            return _unreadable(answer)
        return None
    if answer.status == 400 and b"Invalid HTTP request" in answer.body:
        return None  # refused by the HTTP parser, before there is a request
    try:
        said = answer.json()
    except ValueError as error:
        return f"an error that is not JSON: {error}"
    if part.name == "api":
        try:
            Problem.model_validate(said)
        except ValueError:
            return "an error that is not problem details"
        return None
    readable = isinstance(said, dict) and isinstance(said.get("error"), dict) and bool(said["error"].get("message"))
    return None if readable else "an error that is not an OpenAI error"


def _unreadable(answer: Answer) -> str | None:
    try:
        answer.json()
    except ValueError as error:
        return f"a JSON response that is not JSON: {error}"
    return None


def ask(part: Part, request: Request) -> Answer:
    """The answer to a request, of two attempts the faster one where the first exceeds the limit. Raises
    TimeoutError."""
    answers: list[Answer] = []
    while not answers or (len(answers) < 2 and answers[0].seconds > LIMIT_S):
        answers.append(send(part.port, request.method, request.target, request.headers, request.body, _GIVE_UP_S))
    return min(answers, key=lambda answer: answer.seconds)


def attack(campaign: Campaign, part: Part, routes: Sequence[Route], bound: Bound, database: str) -> dict[str, Any]:
    """Send requests to one part until the bound."""
    rng = random.Random(f"{campaign.seed}/{part.name}/{database}")
    statuses: Counter[int] = Counter()
    known = ["default", "tiny"]
    first: float | None = None
    slowest, structured = 0.0, 0
    seen: set[tuple[str, str]] = set()
    while (share := bound.share(statuses.total())) < 1:
        if first is None and share > 0.1:
            first = part.resident_mib()
        request = make_request(rng, routes, known)
        structured += request.structured
        try:
            answer = ask(part, request)
            rule = broken_rule(part, request.method, request.headers, answer)
            if rule is None and answer.seconds > LIMIT_S:
                rule = f"no answer within {LIMIT_S:g} s"
        except TimeoutError:
            answer, rule = Answer(0, {}, b"", _GIVE_UP_S), f"no answer within {_GIVE_UP_S:g} s"
        except ConnectionRefusedError:
            campaign.add_finding("the part is gone", part=part.name, requests=statuses.total())
            break
        statuses[answer.status] += 1
        slowest = max(slowest, answer.seconds)
        if rule is not None:
            template = re.sub(rb"[^/]{40,}", b"*", request.target.partition(b"?")[0]).decode()
            if (rule, template) not in seen:
                seen.add((rule, template))
                campaign.add_finding(
                    rule, part=part.name, database=database, method=request.method, target=repr(request.target[:500]),
                    headers={name: repr(value[:200]) for name, value in request.headers.items()},
                    body=repr(request.body[:1500]), answer=repr(answer.body[:500]), seconds=round(answer.seconds, 2))
        if answer.status in (201, 202) and len(known) < 50:
            known += re.findall(r'"id": ?"([\w-]+)"', answer.body.decode("utf-8", "replace"))[:1]
    return {"requests": statuses.total(), "structured": structured,
            "statuses": {str(one): statuses[one] for one in sorted(statuses)}, "slowest_s": round(slowest, 2),
            **_memory(campaign, part, part.name, first), "descriptors": part.descriptors()}


def _memory(campaign: Campaign, part: Part, name: str, first: float | None) -> dict[str, int | None]:
    """Resident memory of a part after the first tenth and now, and whether the part still serves."""
    last = part.resident_mib()
    if first is not None and last > first + GROWTH_MIB:
        campaign.add_finding("memory grows", part=name, first_mib=round(first), last_mib=round(last))
    _check_alive(campaign, part)
    return {"first_mib": None if first is None else round(first), "last_mib": round(last)}


def attack_files(campaign: Campaign, part: Part, home: Path, bound: Bound) -> dict[str, Any]:
    """Submit and plan jobs with mutated directories until the bound."""
    rng = random.Random(f"{campaign.seed}/files")
    valid = tiny_target(home / "valid", **published_forms.TARGET)
    statuses: Counter[str] = Counter()
    first: float | None = None
    slowest, directory = 0.0, home / "mutated"
    while (share := bound.share(statuses.total())) < 1:
        if first is None and share > 0.1:
            first = part.resident_mib()
        kind, body = rng.choice(("target", "target", "drafter", "data")), job_body(target={"model": str(valid)})
        if kind == "target":
            mutate_target(rng, valid, directory)
            body["target"] = {"model": str(directory)}
        elif kind == "drafter":
            family = mutate_drafter(rng, directory)
            body |= rng.choice(({"rivals": [{"method": "drafter", "path": str(directory)}]},
                                {"drafter": {"family": family, "init_from": str(directory)}}))
        else:
            body["data"] = {"sources": [{"path": mutate_data(rng, directory)}]}
        request = Request("POST", rng.choice((b"/v1alpha1/plans", b"/v1alpha1/jobs")),
                          {"Content-Type": b"application/json"}, json.dumps(body).encode(), structured=True)
        number = statuses.total()
        try:
            answer = ask(part, request)
        except TimeoutError:
            answer = Answer(0, {}, b"", _GIVE_UP_S)
        statuses[f"{kind}: {answer.status}"] += 1
        slowest = max(slowest, answer.seconds)
        if answer.status not in (200, 202, 422) or answer.seconds > LIMIT_S:
            campaign.add_finding(f"a file is accepted or refused within {LIMIT_S:g} s", kind=kind, number=number,
                                 status=answer.status, seconds=round(answer.seconds, 2), body=repr(body),
                                 answer=repr(answer.body[:500]))
        shutil.rmtree(directory)
    return {"directories": statuses.total(), "statuses": dict(sorted(statuses.items())), "slowest_s": round(slowest, 2),
            **_memory(campaign, part, "files", first)}


def _check_alive(campaign: Campaign, part: Part) -> None:
    base = f"http://127.0.0.1:{part.port}"
    try:
        if part.name == "api":
            answer = httpx.get(f"{base}/v1alpha1/jobs", timeout=LIMIT_S, trust_env=False)
        else:
            answer = httpx.post(f"{base}/v1/chat/completions", timeout=LIMIT_S, trust_env=False, content=json.dumps(
                {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
                headers={"Content-Type": "application/json"})
        status = answer.status_code
    except httpx.HTTPError as error:
        campaign.add_finding("the part does not serve afterwards", part=part.name, error=repr(error))
        return
    if status != 200:
        campaign.add_finding("the part does not serve afterwards", part=part.name, status=status)


def run_schemathesis(campaign: Campaign, program: str, part: Part, share_s: float) -> dict[str, Any]:
    """Run schemathesis against the API; its failures become findings."""
    report = Path(f"/proc/{part.pid}/cwd").resolve() / "schemathesis.json"
    command = [program, "run", f"http://127.0.0.1:{part.port}/openapi.json", "--max-time", f"{share_s:g}", "--seed",
               str(campaign.seed), "--request-timeout", f"{LIMIT_S:g}", "--exclude-checks",
               "positive_data_acceptance,use_after_free", "--exclude-path-regex", "(events|logs)$", "--report", "json",
               "--report-json-path", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=report.parent, check=False,
                          timeout=10 * share_s + 300)
    if done.returncode not in (0, 1) or not report.exists():
        campaign.add_finding("schemathesis did not run", code=done.returncode,
                             output=(done.stdout + done.stderr)[-2000:])
        return {}
    if done.returncode == 1:
        said = re.search(r"=+ (?:ERRORS|FAILURES) =+\n(.*?)(?:=+ (?:WARNINGS|SUMMARY) =+|\Z)", done.stdout, re.DOTALL)
        campaign.add_finding("schemathesis failed", output=(said[1] if said else done.stdout)[-6000:])
    cases = re.search(r"(\d+) generated", done.stdout)
    return {"requests": int(cases[1]) if cases else None, "failed": done.returncode == 1}


def main() -> int:
    """Run the campaign."""
    parser = options("fuzz", "Evil requests against API server, gateway and engine.", 120.0)
    parser.add_argument("--parts", default="api,files,redirects,gateway,engine",
                        help="which parts, separated by commas")
    parser.add_argument("--requests", type=int, help="end after so many, of all parts together, if time allows")
    parser.add_argument("--directories", type=int, help="end after so many mutated directories, if time allows")
    parser.add_argument("--redirects", type=int, default=500, help="files that are read from a server that redirects")
    parser.add_argument("--schemathesis", metavar="PROGRAM", help="also run this schemathesis against the API")
    parser.add_argument("--postgres", action="store_true", help="the API also on PostgreSQL")
    wanted = parser.parse_args()
    parts = wanted.parts.split(",")
    attacked = len({"api", "gateway", "engine"} & set(parts)) + (wanted.postgres and "api" in parts)
    rounds = attacked + ("files" in parts) + (wanted.schemathesis is not None)
    campaign = Campaign("fuzz", wanted.seed, wanted.seconds, wanted.out)
    share, figures = wanted.seconds / max(rounds, 1), dict[str, Any]()

    def bound() -> Bound:
        return Bound(campaign, share, inf if wanted.requests is None else ceil(wanted.requests / attacked))

    with scratch("fuzz") as home:
        if "redirects" in parts:
            figures["redirects"] = attack_redirects(campaign, wanted.redirects, LIMIT_S)
        if "api" in parts:
            with api_server(_made(home / "sqlite")) as part:
                figures["api on SQLite"] = attack(campaign, part, routes_of_api(home / "sqlite"), bound(), "sqlite")
                if wanted.schemathesis is not None:
                    figures["schemathesis"] = run_schemathesis(campaign, wanted.schemathesis, part, share)
            if wanted.postgres:
                with ExitStack() as stack:
                    session = Session()
                    stack.callback(session.end)
                    url = postgres.start(private_dir())
                    part = stack.enter_context(api_server(_made(home / "postgres"), url.url(url.create())))
                    figures["api on PostgreSQL"] = attack(campaign, part, routes_of_api(home / "postgres"), bound(),
                                                          "postgresql")
        if "files" in parts:
            with api_server(_made(home / "for-files")) as part:
                figures["files"] = attack_files(campaign, part, home, Bound(
                    campaign, share, inf if wanted.directories is None else wanted.directories))
        if {"gateway", "engine"} & set(parts):
            # A request that names no length is answered to the end of the context: that takes time, and no defect.
            tiny_target(home / "target", max_position_embeddings=160)
            with endpoint(_made(home / "serving"), home / "target") as both:
                for part in both:
                    if part.name in parts:
                        figures[part.name] = attack(campaign, part, ENGINE_ROUTES, bound(), "-")
    return campaign.finish({"total": _total(figures), **figures})


def _total(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parts to which requests were sent."""
    sent = [part for part in figures.values() if "structured" in part]
    requests = sum(part["requests"] for part in sent)
    return {"requests": requests, "directories": figures.get("files", {}).get("directories", 0),
            "structured_share": round(sum(part["structured"] for part in sent) / max(requests, 1), 3),
            "slowest_s": max((part["slowest_s"] for part in figures.values() if "slowest_s" in part), default=None),
            "growth_mib": max((part["last_mib"] - part["first_mib"] for part in figures.values()
                               if part.get("first_mib") is not None), default=None)}


def _made(path: Path) -> Path:
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main())

"""Restrictions on the files, URLs and environment variables that a job may name.

Stages read the paths, request the URLs and send the API key that a job names with the rights of Eyrie itself. Where
projects share an installation, a caller without a role in all projects must not reach through a job what no route
returns: another project's files under EYRIE_HOME, directories of the system, secrets of Eyrie or of a cloud. The check
does not apply to callers with a role in all projects (`Control.check_spec_policy`).

The result of the check is part of the job (`contract.read_rules`): stages apply it again to the files that they open
(`eyrie_api.file_rules`) and to the addresses that host names have then (`eyrie_api.ssrf_safe_http`). Here host names
are not resolved.
"""

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.targets import JobTarget, is_revision
from eyrie_api.data_files import S3, is_remote
from eyrie_api.errors import InvalidInput
from eyrie_api.file_rules import judge, place_of, reached
from eyrie_api.settings import Settings
from eyrie_api.ssrf_safe_http import is_allowed

_METADATA = ("metadata.google.internal", "metadata")
_NOT_FOR_JOBS = ("EYRIE_", "AWS_")

IsMine = Callable[[str, str], bool]
"""(`jobs` or `endpoints`, id or name) -> whether that directory under EYRIE_HOME is in a project of the caller."""


def check(spec: JobSpec, settings: Settings, is_mine: IsMine) -> ReadRules:
    """The rules that the stages of the job follow. Raises InvalidInput naming the field with a path, variable or URL
    that is not allowed."""
    rules = ReadRules(home=str(settings.home.absolute()), allow_private=settings.webhooks_allow_private,
                      private_hosts=tuple(sorted({host for _, host in credential_hosts(settings) if host})))
    named: list[tuple[str, str]] = []

    def note(field: str, text: str) -> str:
        named.append((field, text))
        return text

    spec.with_paths(note)
    for field, text in named:
        if text.startswith(S3):
            # By parts: team-a/x is below team-a, and team-abc is not.
            wanted = text.removeprefix(S3).split("/")
            allowed = [prefix.strip().strip("/").split("/")
                       for prefix in (settings.data_buckets or "").split(",") if prefix.strip()]
            if ".." in wanted or not any(wanted[:len(parts)] == parts for parts in allowed):
                raise InvalidInput(f"{field} {text} is not of a bucket that jobs of projects may read",
                                   "ask an administrator to add its bucket/prefix to EYRIE_DATA_BUCKETS")
        elif is_remote(text):
            _check_host(field, text, rules, "give a public address of the data")
        else:
            rules = _with_places(field, text, rules, settings, is_mine)
    variable = spec.regenerate.api_key_env
    if variable is not None and (variable.startswith(_NOT_FOR_JOBS) or not variable.endswith("_API_KEY")):
        raise InvalidInput(f"regenerate.api_key_env {variable} is not for jobs to send",
                           "keys for endpoints are in variables that end with _API_KEY")
    urls = [(f"regenerate.endpoints[{number}]", url) for number, url in enumerate(spec.regenerate.endpoints)]
    if spec.regenerate.base_url is not None:
        urls.insert(0, ("regenerate.base_url", spec.regenerate.base_url))
    for field, url in urls:
        host = _check_host(field, url, rules, "give the endpoint's address")
        if variable is not None and (variable, host) not in credential_hosts(settings):
            raise InvalidInput(f"{field} names {host}, and {variable} may not be sent there",
                               f"ask an administrator to add {variable}={host} to EYRIE_CREDENTIAL_HOSTS")
    return rules


def check_target(target: JobTarget, settings: Settings, is_mine: IsMine) -> ReadRules:
    """The rules of an endpoint that serves a target without a job. Raises InvalidInput for files that may not be
    read."""
    if target.revision is not None and not is_revision(target.revision):
        raise InvalidInput(f"target.revision {target.revision!r} is no branch, tag or commit",
                           "name one, or leave it out")
    return _with_places("target.model", target.model, ReadRules(home=str(settings.home.absolute())), settings, is_mine)


def require_rules(job_id: str, job: ResolvedJob) -> None:
    """Raises InvalidInput for a stored job that a version without rules accepted."""
    if job.endpoint_rules is None:
        raise InvalidInput(f"job {job_id} was accepted by a version that had no rules for the files that jobs read",
                           f"submit it again: GET /v1alpha1/jobs/{job_id}/submitted has its document")


def credential_hosts(settings: Settings) -> frozenset[tuple[str, str]]:
    """The pairs of EYRIE_CREDENTIAL_HOSTS: (variable, host)."""
    pairs = (pair.partition("=") for pair in (settings.credential_hosts or "").split(","))
    return frozenset((variable.strip(), host.strip().lower()) for variable, _, host in pairs)


def _check_host(field: str, url: str, rules: ReadRules, hint: str) -> str:
    """The host of a URL, in lower case. Raises InvalidInput for one that jobs may not send requests to."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:  # an unclosed bracket
        host = ""
    if host in _METADATA or not _may_be_asked(host, rules.allow_private or host in rules.private_hosts):
        raise InvalidInput(f"{field} names {host}, which jobs may not ask", hint)
    return host


def _with_places(field: str, text: str, rules: ReadRules, settings: Settings, is_mine: IsMine) -> ReadRules:
    """The rules with the project's jobs and endpoints whose files a path names. Raises InvalidInput for a path that may
    not be read."""
    home = settings.home.resolve()
    for path in reached(field, text):
        place = place_of(path, home)
        if place is not None and place not in rules.places and is_mine(*place.split("/")):
            rules = rules.model_copy(update={"places": (*rules.places, place)})
        judge(field, text, path, rules)
    return rules


def _may_be_asked(host: str, allow_private: bool) -> bool:
    """An address in any form that the resolver takes (`2852039166`, `0xa9fea9fe`, `0251.0376.169.254`) is checked as
    the address that it stands for; other scripts' digits are refused, since clients normalise them."""
    if not host or not host.isascii():
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return allow_private or host.rpartition(".")[2] != "localhost"  # a host name, not an IP address
    return is_allowed(str(address), allow_private=allow_private)

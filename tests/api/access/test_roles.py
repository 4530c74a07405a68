"""Who may do what: roles by project, scopes that only narrow, and things of others that are not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.access.roles import ACTIONS, ALL_PROJECTS, ALLOWED, ROLES, Principal
from eyrie_api.access.scope import Scope
from eyrie_api.contract.access import Role
from eyrie_api.errors import Forbidden, NotFound

PROJECTS = ("a", "b", ALL_PROJECTS)
roles_by_project = st.dictionaries(st.sampled_from(PROJECTS), st.sampled_from(ROLES))
some_scopes = st.none() | st.frozensets(st.sampled_from(ACTIONS))
principals = st.builds(Principal, subject=st.just("key:x"), roles=roles_by_project, scopes=some_scopes)


@pytest.mark.parametrize(("role", "may", "may_not"), [
    ("viewer", "jobs:read", "jobs:write"), ("operator", "jobs:write", "keys:write"),
    ("operator", "endpoints:write", "audit:read"), ("admin", "quotas:write", None)])
def test_a_role_allows_what_it_says(role: Role, may: str, may_not: str | None) -> None:
    principal = Principal(subject="user:x", roles={"a": role})
    assert principal.allows(may, "a")  # type: ignore[arg-type]
    assert may_not is None or not principal.allows(may_not, "a")  # type: ignore[arg-type]
    assert not principal.allows(may, "b")  # type: ignore[arg-type]


def test_each_role_allows_all_that_the_lower_one_does() -> None:
    assert ALLOWED["viewer"] < ALLOWED["operator"] < ALLOWED["admin"] == set(ACTIONS)


@given(principal=principals, action=st.sampled_from(ACTIONS), project=st.sampled_from(PROJECTS), scopes=some_scopes)
def test_scopes_never_give_what_roles_do_not(principal: Principal, action: str, project: str,
                                            scopes: frozenset[str] | None) -> None:
    whole = principal.model_copy(update={"scopes": None})
    if principal.allows(action, project):  # type: ignore[arg-type]
        assert whole.allows(action, project)  # type: ignore[arg-type]
        assert principal.scopes is None or action in principal.scopes


@given(principal=principals, action=st.sampled_from(ACTIONS))
def test_what_is_listed_is_what_may_be_read_one_by_one(principal: Principal, action: str) -> None:
    readable = principal.readable(action)  # type: ignore[arg-type]
    for project in ("a", "b", "c"):
        listed = readable is None or project in readable
        assert listed is principal.allows(action, project)  # type: ignore[arg-type]


@given(principal=principals, action=st.sampled_from(ACTIONS), project=st.sampled_from(("a", "b", "c")))
def test_a_refusal_tells_nothing_of_projects_one_is_not_in(principal: Principal, action: str, project: str) -> None:
    absent, refusal = NotFound("no job 'job-1'"), None
    try:
        Scope(principal).check(action, project, absent)  # type: ignore[arg-type]
    except (Forbidden, NotFound) as error:
        refusal = error
    assert (refusal is None) is principal.allows(action, project)  # type: ignore[arg-type]
    if refusal is not None:
        member = bool({project, ALL_PROJECTS} & principal.roles.keys())
        assert type(refusal) is Forbidden if member else refusal is absent

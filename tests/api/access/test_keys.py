"""API keys: handed out once, kept as a digest, refused when wrong, late, revoked or mistyped."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.access.keys import NewKey, create_key, id_of, verify_key
from eyrie_api.access.roles import Principal
from eyrie_api.errors import InvalidInput, Unauthorized
from tests.api.samples import NOW

ADMIN = Principal(subject="user:boss", roles={"a": "admin"})
LATER = NOW + timedelta(days=30)


def a_key() -> NewKey:
    return create_key("ci", ADMIN, {"a": "operator"}, NOW, expires_at=LATER)


def test_a_key_stands_for_its_roles_until_it_expires_or_is_revoked() -> None:
    key = a_key()
    assert id_of(key.text) == key.record.id
    assert verify_key(key.text, key.record, NOW) == Principal(subject=f"key:{key.record.id}", roles={"a": "operator"},
                                                              expires_at=LATER)
    with pytest.raises(Unauthorized, match="expired"):
        verify_key(key.text, key.record, LATER)
    revoked = key.record.model_copy(update={"revoked_at": NOW})
    with pytest.raises(Unauthorized, match="revoked"):
        verify_key(key.text, revoked, NOW)


def test_nothing_that_is_kept_or_shown_holds_the_secret() -> None:
    key = a_key()
    secret = key.text[17:]
    for shown in (repr(key), repr(key.record), key.record.model_dump_json()):
        assert secret not in shown
        assert key.text not in shown
    assert key.record.secret_sha256 not in repr(key.record)


def test_another_keys_secret_and_an_unknown_id_are_refused_in_the_same_words() -> None:
    one, other = a_key(), a_key()
    result = []
    for text, record in ((other.text, one.record), (one.text, None), (one.text, other.record)):
        with pytest.raises(Unauthorized) as caught:
            verify_key(text, record, NOW)
        result.append(str(caught.value))
    assert len(set(result)) == 1
    assert one.text != other.text


@given(place=st.integers(0, 67), letter=st.sampled_from("0aZ_-. "))
def test_a_key_mistyped_anywhere_is_refused_without_a_look_at_the_database(place: int, letter: str) -> None:
    text = a_key().text
    assert len(text) == 66
    wrong = text[:place] + letter + text[place + 1:]
    if wrong != text:
        with pytest.raises(Unauthorized, match="not a valid API key"):
            id_of(wrong)
    with pytest.raises(Unauthorized, match="not a valid API key"):
        id_of(text[:-1])


def test_no_key_may_do_more_than_who_made_it() -> None:
    operator = Principal(subject="user:x", roles={"a": "operator"})
    for roles in ({"a": "admin"}, {"b": "viewer"}, {"*": "viewer"}):
        with pytest.raises(InvalidInput, match="may not"):
            create_key("x", operator, roles, NOW, expires_at=None)  # type: ignore[arg-type]
    narrowed = create_key("x", operator, {"a": "admin"}, NOW, expires_at=None, scopes=frozenset({"jobs:read"}))
    principal = verify_key(narrowed.text, narrowed.record, NOW + timedelta(days=9999))
    assert principal.allows("jobs:read", "a")
    assert not principal.allows("jobs:write", "a")
    with pytest.raises(InvalidInput, match="may not"):
        create_key("y", principal, {"a": "viewer"}, NOW, expires_at=None)


def test_a_key_that_has_expired_already_is_not_made() -> None:
    with pytest.raises(InvalidInput, match="expires_at"):
        create_key("x", ADMIN, {"a": "viewer"}, NOW, expires_at=NOW)

"""Settings from the environment."""

from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_api.request_origin import is_loopback_host
from eyrie_api.settings import Settings


def test_the_environment_is_read_and_the_rest_has_defaults(tmp_path: Path) -> None:
    settings = Settings.from_env({"EYRIE_HOME": str(tmp_path), "EYRIE_PORT": "9000", "EYRIE_TOKEN": "",
                                  "EYRIE_BROKER_URL": "redis://r/0", "HOME": "/root"})
    assert (settings.port, settings.broker_url, settings.token) == (9000, "redis://r/0", None)
    assert settings.resolved_database_url == f"sqlite:///{tmp_path}/eyrie.db"
    assert settings.stage_dir("job-1", "train", "base") == tmp_path / "jobs" / "job-1" / "stages" / "train" / "base"


def test_a_wrong_variable_is_named_with_its_value() -> None:
    with pytest.raises(InvalidInput, match="EYRIE_PORT = 'http'"):
        Settings.from_env({"EYRIE_PORT": "http"})


def test_a_secret_that_is_wrong_is_not_printed() -> None:
    with pytest.raises(InvalidInput, match="EYRIE_TOKEN") as caught:
        Settings.from_env({"EYRIE_TOKEN": "sesame"})
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("127.8.8.8", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False)])
def test_which_binds_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback_host(host) is loopback

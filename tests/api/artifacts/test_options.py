"""Where the store is: variables, urls, and what is refused before anything is asked of it."""

from pathlib import Path

import pytest

from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.s3 import S3Store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.errors import InvalidInput
from eyrie_api.settings import Settings


def test_the_control_plane_and_stage_programs_read_the_same_variables() -> None:
    environ = {"EYRIE_ARTIFACTS_URL": "s3://bucket/eyrie", "EYRIE_ARTIFACTS_ENDPOINT_URL": "http://minio:9000",
               "EYRIE_ARTIFACTS_PARALLEL": "8", "EYRIE_ARTIFACTS_CREDENTIALS_DIR": "/etc/eyrie/s3", "EYRIE_PORT": "1"}
    options = StoreOptions.from_env(environ)
    assert (options.url, options.parallel, options.credentials_dir) == ("s3://bucket/eyrie", 8, Path("/etc/eyrie/s3"))
    settings = Settings.from_env(environ)
    assert (settings.artifacts, settings.port) == (options, 1)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(("name", "value"), [("PARALLEL", "0"), ("ADDRESSING", "host"), ("PART_SIZE_BYTES", "1024"),
                                             ("ENDPOINT_URL", "minio:9000")])
def test_a_variable_that_is_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"EYRIE_ARTIFACTS_{name} = '{value}'"):
        Settings.from_env({f"EYRIE_ARTIFACTS_{name}": value})


def test_a_url_says_which_kind_of_store(tmp_path: Path) -> None:
    options = StoreOptions()
    for url in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", (tmp_path / "a b").as_uri()):
        opened = open_store(url, options)
        assert isinstance(opened, LocalStore)
        assert opened.url == (tmp_path / "a b").as_uri()
    s3 = open_store("s3://bucket/some/prefix/", options)
    assert isinstance(s3, S3Store)
    assert s3.url == "s3://bucket/some/prefix"
    assert open_store("s3://bucket", options).url == "s3://bucket"
    assert isinstance(open_store(options=StoreOptions(url=str(tmp_path))), LocalStore)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "s3:///x", "s3://bucket/.hidden", "file://host/x",
                                 "s3://AKIAX:sesame@bucket/x", "s3://bucket/x?key=sesame"])
def test_a_url_that_names_no_store_is_refused_without_telling_secrets(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store(url, StoreOptions())
    assert caught.value.hint
    assert "sesame" not in str(caught.value)


def test_without_a_url_there_is_no_store() -> None:
    with pytest.raises(InvalidInput, match="EYRIE_ARTIFACTS_URL"):
        open_store(options=StoreOptions())

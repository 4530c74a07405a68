"""`make test-gpu` needs an image's Python and a folder of wheels: what it reports, and that its list is complete."""

from pathlib import Path

import pytest
import torch

from tests.gpu.image import CARRIED, differences, install, main, missing, pins, programs, walk


def test_versions_other_than_the_pinned_ones_are_reported_and_local_builds_are_not_other_versions() -> None:
    pinned = pins("# a comment\ntorch==2.13.0\npydantic_core==2.50.4\n")
    assert differences(pinned, {"torch": "2.13.0+cu130", "pydantic-core": "2.50.4", "numpy": "1"}) == []
    assert differences(pinned, {"torch": "2.12.1+cu128"}) == [
        "version: torch 2.12.1+cu128 is installed, and Eyrie is tested with 2.13.0"]


def test_what_is_missing_is_named_with_what_to_do() -> None:
    lines = missing(["torch", "pydantic-core", "numpy"], {"numpy": "2"})
    assert [line.partition(":")[0] for line in lines] == ["missing"] * 2
    assert "torch: use an image" in lines[0]
    assert "pydantic-core: put its wheel" in lines[1]


def test_an_empty_folder_of_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no wheel"):
        install(tmp_path, tmp_path / "into")


def test_several_programs_run_one_after_the_other() -> None:
    assert programs(["-m", "a", "+", "-m", "b", "c"]) == [["-m", "a"], ["-m", "b", "c"]]


def test_the_list_of_carried_packages_is_what_the_gpu_tests_and_the_benchmark_import() -> None:
    assert walk() == [line for line in CARRIED.read_text().splitlines() if line and not line.startswith("#")]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--check"]) == 1
    assert "missing: a GPU" in capsys.readouterr().out

"""Packs for an image without a network (`benchmarks.gpu.pack`): what is emptied, packed and unpacked."""

import struct
from pathlib import Path

import pytest

from benchmarks.gpu.pack import __main__ as pack
from benchmarks.gpu.pack import unpack
from benchmarks.gpu.pack.slim import cubins


def fat_binary(*architectures: int) -> bytes:
    """A section with one fat binary, whose cubin for each architecture has eight bytes."""
    entries = b"".join(struct.pack("<HHIQIIHHI", 2, 0x101, 64, 8, 0, 0, 0, 0, arch).ljust(64, b"\0") + b"\xff" * 8
                       for arch in architectures)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_the_cubins_of_a_library_are_found_with_their_architectures() -> None:
    section = fat_binary(80, 90) + bytes(8) + fat_binary(100)
    found = [*cubins(section, 0, len(section))]
    assert [(length, arch, compressed) for _, length, arch, compressed in found] == [
        (8, 80, False), (8, 90, False), (8, 100, False)]
    assert all(section[at:at + length] == b"\xff" * 8 for at, length, *_ in found)


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = pack.Pack(tmp_path / "packs")
    monkeypatch.setattr(pack, "PART_BYTES", 100)
    for name in ("tree/site", "job/job"):
        (made.work / name).mkdir(parents=True)
        (made.work / name / "module.py").write_text(f"NAME = {name!r}\n")
    made.step("packs", made.write)
    assert made.not_done == []
    return made.out


def test_both_packs_are_unpacked_from_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = packed(tmp_path, monkeypatch)
    assert len([*packs.glob("sglang.tar.xz.*")]) > 1
    unpack.main(packs, tmp_path / "to")
    assert (tmp_path / "to/site/module.py").read_text() == "NAME = 'tree/site'\n"
    assert (tmp_path / "to/job/module.py").read_text() == "NAME = 'job/job'\n"
    assert f'PYTHONPATH="{tmp_path}/to/plugin:{tmp_path}/to/site${{PYTHONPATH:+:$PYTHONPATH}}"' in (
        tmp_path / "to/environment").read_text()


def test_a_part_that_was_damaged_on_the_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = packed(tmp_path, monkeypatch)
    part = packs / "job.tar.xz.00"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit, match=r"job\.tar\.xz\.00 has another digest"):
        unpack.main(packs, tmp_path / "to")


def test_a_step_that_cannot_run_is_named_and_runs_the_next_time_with_those_after_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def without_compiler(_: Path) -> None:
        raise pack.NotDone("no nvcc 13.0 here")

    made, ran = pack.Pack(tmp_path), []
    made.step("jit", without_compiler)
    made.step("packs", ran.append)
    assert made.not_done == ["jit"]
    assert "NOT DONE: jit: no nvcc 13.0 here" in capsys.readouterr().out
    for _ in range(2):
        made = pack.Pack(tmp_path)
        for name in ("jit", "packs"):
            made.step(name, ran.append)
    assert [path.name for path in ran] == ["packs", "jit", "packs"]

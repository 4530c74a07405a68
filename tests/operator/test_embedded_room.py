"""Whether a second engine fits the machine, decided from free memory."""

from pathlib import Path

from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_operator.embedded.endpoints import FreeMemory, find_room, free_memory, weight_bytes

GIB = 2**30
SGLANG = EngineSpec(kind="sglang")


def test_without_gpus_main_memory_decides() -> None:
    assert find_room(SGLANG, 4 * GIB, FreeMemory(8 * GIB)).missing == ""
    missing = find_room(SGLANG, 4 * GIB, FreeMemory(6 * GIB)).missing
    assert missing == "another engine needs about 6.5 GiB of main memory and 6.0 GiB are free"
    assert find_room(EngineSpec(), 4 * GIB, FreeMemory(6 * GIB)).missing == ""


def test_an_engine_gets_the_gpus_with_the_most_free_memory() -> None:
    free = FreeMemory(GIB, {"0": 8 * GIB, "1": 70 * GIB, "2": 80 * GIB, "3": 75 * GIB})
    assert find_room(SGLANG, 16 * GIB, free).gpus == ("2",)
    assert find_room(EngineSpec(kind="sglang", tp_size=2), 120 * GIB, free).gpus == ("2", "3")
    missing = find_room(EngineSpec(kind="sglang", tp_size=4), 120 * GIB, free).missing
    assert missing == "another engine needs 4 GPUs with about 34.0 GiB free, and 3 of 4 have that"


def test_weights_are_those_of_target_and_drafter(tmp_path: Path) -> None:
    for name, size in (("target", 100), ("drafter", 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    use = DrafterUse(drafter_dir=str(tmp_path / "drafter"), setting=Setting.model_validate(
        {"tree": {"num_steps": 2, "top_k": 1, "num_draft_tokens": 3}}))
    assert weight_bytes(tmp_path / "target", use) == 110
    assert weight_bytes(tmp_path / "target", DrafterUse()) == 100
    assert free_memory().main_bytes > 0

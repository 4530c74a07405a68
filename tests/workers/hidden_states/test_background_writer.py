"""Shards are written while the caller goes on, within a bound."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eyrie_pipelines.processes import wait_until
from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow
from eyrie_workers.hidden_states.writer import BackgroundWriter, FeatureWriter, ShardFile

FORMAT = StoreFormat(aux_layers=(1,), hidden_size=4, codec="float32", target_digest="sha256:" + "0" * 64)
ROWS = [TokenRow(f"row-{i}", torch.arange(3), torch.tensor([False, True, True])) for i in range(6)]
STATES = {"aux_codes": torch.ones(3, 1, 4), "final_codes": torch.ones(2, 4)}


def test_the_caller_goes_on_while_a_slow_disk_writes_and_waits_at_the_bound(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, arrived, append = threading.Semaphore(0), threading.Event(), ShardFile.append

    def slow(shard: ShardFile, states: Mapping[str, Tensor], num_rows: int) -> None:
        arrived.set()
        disk.acquire()
        append(shard, states, num_rows)

    monkeypatch.setattr(ShardFile, "append", slow)
    given: list[int] = []
    with BackgroundWriter(FeatureWriter(tmp_path, FORMAT)) as background:

        def give() -> None:
            for i in range(6):
                background.put(STATES, 1)
                given.append(i)
            background.end()

        background.begin(0, ROWS)
        caller = threading.Thread(target=give)
        caller.start()
        try:
            assert arrived.wait(60)
            assert wait_until(lambda: len(given) >= 3, 60.0)
            caller.join(0.2)  # more would be given by then if nothing stopped it
            assert given == [0, 1, 2]
        finally:
            for _ in range(6):
                disk.release()
        caller.join()
        background.finish()
    assert given == [0, 1, 2, 3, 4, 5]
    assert FeatureWriter(tmp_path, FORMAT).num_rows == 6


def test_the_error_of_a_writer_wakes_a_caller_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError("the disk is gone")

    def put_all(background: BackgroundWriter) -> None:
        for _ in ROWS:
            background.put(STATES, 1)

    monkeypatch.setattr(ShardFile, "append", failing)
    with BackgroundWriter(FeatureWriter(tmp_path, FORMAT)) as background:
        background.begin(0, ROWS)
        with pytest.raises(OSError, match="the disk is gone"):
            put_all(background)
    assert not list(tmp_path.iterdir())


def test_an_open_shard_that_is_left_is_deleted_and_an_ended_one_completed(tmp_path: Path) -> None:
    with BackgroundWriter(FeatureWriter(tmp_path, FORMAT)) as background:
        for number in (0, 1):
            background.begin(number, ROWS[:2])
            background.put(STATES, 1)
            if number == 0:
                background.put(STATES, 1)
                background.end()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.states"]

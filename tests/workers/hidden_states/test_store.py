"""The hidden-state store gives back what was written, survives kills, and names what is broken."""

import hashlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie_api.artifacts import digest_bytes
from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.capture import BEST_FIRST
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict
from eyrie_workers.hidden_states.shard_format import (
    INDEX,
    StoreFormat,
    TopKLogits,
    plan_shards,
    shard_name,
    supervised_positions,
)
from eyrie_workers.hidden_states.storage_backend import LocalBackend, ObjectStoreBackend, read_shard_end
from eyrie_workers.hidden_states.store import Buffers, FeatureStore, StoreDamaged
from eyrie_workers.hidden_states.writer import FeatureWriter, is_whole
from tests.feature_rows import FeatureRow, write_shard

DIGEST = "sha256:" + "0" * 64
COUNTER = itertools.count()


def layout(codec: str = "float32", num_aux: int = 3, hidden: int = 8, block_tokens: int = 1024) -> StoreFormat:
    return StoreFormat(aux_layers=tuple(range(1, num_aux + 1)), hidden_size=hidden, codec=codec,
                       target_digest=DIGEST, block_tokens=block_tokens)


def store_of(directory: Path, of: StoreFormat, lengths: list[int], rows_per_shard: int = 1) -> list[FeatureRow]:
    """A finished store of random rows."""
    rows = [random_row(f"r{i}", length, of, seed=i) for i, length in enumerate(lengths)]
    writer = FeatureWriter(directory, of)
    for start in range(0, len(rows), rows_per_shard):
        write_shard(writer, rows[start:start + rows_per_shard])
    writer.finish()
    return rows


def upload_files(store: ArtifactStore, directory: Path, prefix: str) -> None:
    """The files of a store, as a stage leaves them behind when its manifest is not written yet."""
    for path in sorted(path for path in directory.iterdir() if not path.name.startswith(".")):
        store.upload(f"{prefix}/{path.name}", path)


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def random_row(row_id: str, length: int, of: StoreFormat, seed: int = 0) -> FeatureRow:
    generator = torch.Generator().manual_seed(seed)
    return FeatureRow(
        row_id, torch.randint(0, 2**31 - 1, (length,), generator=generator),
        torch.rand(length, generator=generator) < 0.5,
        torch.randn(length, len(of.aux_layers), of.hidden_size, generator=generator),
        torch.randn(length, of.hidden_size, generator=generator))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), codec=st.sampled_from(["float32", "bfloat16"]),
       num_aux=st.integers(1, 4), limit=st.integers(1, 20_000), block_tokens=st.sampled_from([1, 7, 1024]))
def test_rows_come_back_as_written_and_final_states_where_they_teach(
        tmp_path: Path, lengths: list[int], codec: str, num_aux: int, limit: int, block_tokens: int) -> None:
    of = layout(codec, num_aux, block_tokens=block_tokens)
    rows = [random_row(f"r{i}", length, of, seed=i) for i, length in enumerate(lengths)]
    directory = tmp_path / str(next(COUNTER))
    writer = FeatureWriter(directory, of)
    for shard in plan_shards(lengths, of, limit):
        write_shard(writer, [rows[i] for i in shard])
    writer.finish()
    store = FeatureStore(directory)
    assert not list(store.damage())
    assert (store.num_rows, store.num_tokens, store.lengths) == (len(rows), sum(lengths), lengths)
    assert store.row_ids == [row.row_id for row in rows]
    for i in reversed(range(len(rows))):
        back, taught = store.read([i]), supervised_positions(rows[i].loss_mask)
        assert torch.equal(back.token_ids, rows[i].token_ids)
        assert torch.equal(back.loss_mask, rows[i].loss_mask)
        assert torch.equal(back.aux, rows[i].aux.to(of.dtype))
        assert torch.equal(back.last[taught], rows[i].last.to(of.dtype)[taught])
        assert not back.last[~taught].any()
        ids, mask = store.tokens(i)
        assert torch.equal(ids, rows[i].token_ids)
        assert torch.equal(mask, rows[i].loss_mask)


@pytest.mark.parametrize("codec", BEST_FIRST)
@pytest.mark.parametrize("hidden", [8, 64])
def test_a_batch_is_its_rows_end_to_end_in_the_order_asked(tmp_path: Path, codec: str, hidden: int) -> None:
    of = layout(codec, hidden=hidden, block_tokens=7)
    store_of(tmp_path, of, [5, 30, 1, 14], rows_per_shard=2)
    store = FeatureStore(tmp_path)
    order = [3, 0, 1]
    packed = store.read(order)
    rows = [store.read([i]) for i in order]
    assert packed.lengths == (14, 5, 30)
    for name in ("token_ids", "loss_mask", "aux", "last"):
        assert torch.equal(getattr(packed, name), torch.cat([getattr(row, name) for row in rows])), name
    assert packed.aux.dtype == of.dtype
    buffers = Buffers(torch.full((60, 3, hidden), torch.nan), torch.full((60, hidden), torch.nan))
    again = store.read(order, into=buffers)
    assert torch.equal(again.aux, packed.aux.float())
    assert torch.equal(again.last, packed.last.float())
    assert again.aux.data_ptr() == buffers.aux.data_ptr()


def test_reading_ahead_gives_the_same_batches_and_ends_when_it_is_left(tmp_path: Path) -> None:
    store_of(tmp_path, layout("int8"), [9, 4, 7, 12, 3, 8], rows_per_shard=2)
    store = FeatureStore(tmp_path)
    groups = [[5, 0], [1], [4, 3], [2]]
    for ahead in (0, 1, 5):
        for packed, group in zip(store.batches(groups, ahead=ahead), groups, strict=True):
            assert torch.equal(packed.aux, store.read(group).aux)
        again = store.batches(groups * 2, ahead=ahead, reuse=True)
        for packed, group in zip(again, groups * 2, strict=True):
            assert torch.equal(packed.aux, store.read(group).aux)
            assert torch.equal(packed.last, store.read(group).last)
    reading = store.batches(groups)
    next(reading)
    reading.close()


def test_the_same_store_is_read_from_an_artifact_store_by_ranges(tmp_path: Path) -> None:
    of = layout("int8", block_tokens=8)
    store_of(tmp_path / "here", of, [9, 20, 3, 12], rows_per_shard=2)
    elsewhere = LocalStore(tmp_path / "elsewhere")
    upload_files(elsewhere, tmp_path / "here", "jobs/1/capture")
    here, there = FeatureStore(tmp_path / "here"), FeatureStore(ObjectStoreBackend(elsewhere, "jobs/1/capture"))
    assert not list(there.damage())
    assert there.row_ids == here.row_ids
    assert torch.equal(there.read([2, 0, 1, 3]).aux, here.read([2, 0, 1, 3]).aux)
    assert torch.equal(there.read([1]).last, here.read([1]).last)
    flip_a_bit(tmp_path / "elsewhere/jobs/1/capture" / shard_name(1), 200)
    with pytest.raises(StoreDamaged, match="shard-00001"):
        FeatureStore(ObjectStoreBackend(elsewhere, "jobs/1/capture")).read([2, 3])
    assert (tmp_path / "elsewhere/jobs/1/capture/shard-00001.damaged").is_file(), "whoever repairs it finds a note"


@given(lengths=st.lists(st.integers(1, 500), max_size=60), limit=st.integers(1, 200_000))
def test_a_shard_plan_covers_every_row_once_and_keeps_the_size_limit(lengths: list[int], limit: int) -> None:
    of = layout()
    plan = list(plan_shards(lengths, of, limit))
    assert [i for shard in plan for i in shard] == list(range(len(lengths)))
    for shard in plan:
        assert len(shard) == 1 or sum(of.row_bytes(lengths[i]) for i in shard) <= limit


@pytest.mark.parametrize("codec", BEST_FIRST)
def test_the_plans_bytes_are_what_the_files_weigh(tmp_path: Path, codec: str) -> None:
    of = layout(codec, hidden=64)
    row = random_row("a", 1000, of)
    write_shard(FeatureWriter(tmp_path, of), [row])
    size = (tmp_path / shard_name(0)).stat().st_size
    taught = int(supervised_positions(row.loss_mask).sum())
    planned = of.stored_as.bytes_of(1000, taught, 3, 64)
    record_and_alignment = 1000
    assert planned <= size <= planned + record_and_alignment


def test_shards_stand_alone_so_a_killed_writer_repeats_only_the_open_one(tmp_path: Path) -> None:
    of = layout()
    rows = store_of(tmp_path / "whole", of, [10, 11, 12, 13])
    broken = tmp_path / "broken"
    first = FeatureWriter(broken, of)
    write_shard(first, [rows[0]])
    write_shard(first, [rows[3]], 3)
    (broken / ".shard-00001.states.part").write_bytes(b"half")
    (broken / ".index.json.abcdefgh").write_bytes(b"half")
    again = FeatureWriter(broken, of)
    assert [number for number in range(4) if again.holds(number, [f"r{number}"])] == [0, 3]
    with pytest.raises(ValueError, match="not complete"):
        again.finish()
    for number in (2, 1):
        write_shard(again, [rows[number]], number)
    again.finish()
    one, other = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path / "whole", broken))
    assert one == other


def test_a_lost_index_is_composed_again_from_the_shards(tmp_path: Path) -> None:
    store_of(tmp_path, layout(), [5, 6, 7])
    before = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).unlink()
    assert FeatureStore(tmp_path).lengths == [5, 6, 7]
    assert FeatureStore(tmp_path).digest == digest_bytes(before)
    FeatureWriter(tmp_path, layout()).finish()
    assert (tmp_path / INDEX).read_bytes() == before


def flip(path: Path) -> None:
    flip_a_bit(path, path.stat().st_size // 3)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [flip, cut, cut_to_nothing, Path.unlink])
def test_every_damage_is_named_with_its_rows_and_repaired_alone(tmp_path: Path, harm: object) -> None:
    of = layout("int8")
    rows = store_of(tmp_path, of, [10, 11, 12, 13, 14, 15], rows_per_shard=2)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert is_whole(tmp_path)
    harm(tmp_path / shard_name(1))  # type: ignore[operator]
    with pytest.raises(StoreDamaged, match=r"shard-00001.*rows? [23]"):
        FeatureStore(tmp_path).read(range(6))
    assert not is_whole(tmp_path)
    writer = FeatureWriter(tmp_path, of)
    assert sorted(writer.shards) == [0, 2]
    write_shard(writer, rows[2:4], 1)
    writer.finish()
    assert is_whole(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    assert not list(FeatureStore(tmp_path).damage())


def test_a_flipped_bit_anywhere_in_a_shard_is_found(tmp_path: Path) -> None:
    store_of(tmp_path, layout("int4", num_aux=1), [3, 2], rows_per_shard=2)
    path = tmp_path / shard_name(0)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        flip_a_bit(path, at)
        damaged = list(FeatureStore(tmp_path).damage())
        end = read_shard_end(LocalBackend(tmp_path), path.name)
        assert damaged or end is None, f"byte {at}"
        path.write_bytes(data)
        for note in tmp_path.glob("*.damaged"):
            note.unlink()


def test_a_directory_without_an_index_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissing, match="run capture first"):
        FeatureStore(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ArtifactCorrupt):
        FeatureStore(tmp_path)


def numbers(*shape: int, step: int) -> torch.Tensor:
    """Multiples of 1/8 that no random generator chooses."""
    return ((torch.arange(math.prod(shape)) * step % 101) - 50).to(torch.float32).div_(8.0).view(shape)


@pytest.mark.parametrize(("codec", "final_state", "digest"), [
    ("float32", "keep", "63687e71ca5a6706752c6eb65564b14d"), ("bfloat16", "keep", "efb50ed33bdf40d121c39bf5dd4dc79d"),
    ("int8", "keep", "0214b2fd5a72a504d44597d4113cc436"), ("fp8", "keep", "fa22c4c80eab711675d22ac0eba02db0"),
    ("int4", "keep", "88683e6354c6bb5a4e9ba788979115af"), ("int8", "topk", "ecab4028970fa7489498d2104fefe527")])
def test_the_bytes_of_a_shard_are_those_that_earlier_versions_wrote(
        codec: str, final_state: str, digest: str, tmp_path: Path) -> None:
    extra = {"top_k": 2, "draft_ids": tuple(range(40))} if final_state == "topk" else {}
    of = StoreFormat.model_validate({"aux_layers": (1, 3), "hidden_size": 36, "codec": codec, "block_tokens": 16,
                                     "target_digest": "sha256:" + "0" * 64, "final_state": final_state, **extra})
    rows = []
    for length in (40, 3, 17):
        mask = torch.arange(length) >= length // 3
        mask[length - 2:length - 1] = False
        num = int(mask[1:].sum())
        topk = TopKLogits(torch.arange(num * 2).view(num, 2) % 40, -numbers(num, 2, step=3).abs(),
                          numbers(num, step=5).abs(), numbers(num, step=7).abs(), torch.arange(num) % 40)
        rows.append(FeatureRow(f"row-{length}", torch.arange(length) * 7 % 320, mask, numbers(length, 2, 36, step=37),
                               numbers(length, 36, step=11), topk if final_state == "topk" else None))
    write_shard(FeatureWriter(tmp_path, of), rows)
    assert hashlib.sha256((tmp_path / "shard-00000.states").read_bytes()).hexdigest()[:32] == digest


def test_states_of_another_layout_are_refused(tmp_path: Path) -> None:
    store_of(tmp_path, layout(), [3])
    with pytest.raises(Conflict, match="codec: float32 instead of bfloat16"):
        FeatureWriter(tmp_path, layout("bfloat16"))


def test_rows_outside_the_store_raise_index_error(tmp_path: Path) -> None:
    of = layout()
    write_shard(FeatureWriter(tmp_path, of), [random_row("a", 5, of)])
    with pytest.raises(IndexError):
        FeatureStore(tmp_path).read([1])
    with pytest.raises(IndexError):
        FeatureStore(tmp_path).read([-1])

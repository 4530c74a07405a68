"""The hidden-state store gives back what was written, survives kills, and names what is broken."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict
from eyrie_workers.features.layout import INDEX, FeatureRow, StoreLayout, plan_shards
from eyrie_workers.features.store import FeatureStore
from eyrie_workers.features.writer import FeatureWriter

DIGEST = "sha256:" + "0" * 64
COUNTER = itertools.count()


def layout(codec: str = "float32", num_aux: int = 3, hidden: int = 8) -> StoreLayout:
    return StoreLayout(aux_layers=tuple(range(1, num_aux + 1)), hidden_size=hidden, codec=codec,  # type: ignore[arg-type]
                       target_digest=DIGEST)


def random_row(row_id: str, length: int, of: StoreLayout, seed: int = 0) -> FeatureRow:
    generator = torch.Generator().manual_seed(seed)
    return FeatureRow(
        row_id, torch.randint(0, 2**31 - 1, (length,), generator=generator),
        torch.rand(length, generator=generator) < 0.5,
        torch.randn(length, len(of.aux_layers), of.hidden_size, generator=generator),
        torch.randn(length, of.hidden_size, generator=generator))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), codec=st.sampled_from(["float32", "bfloat16"]),
       num_aux=st.integers(1, 4), limit=st.integers(1, 20_000))
def test_rows_come_back_as_written_in_the_stored_dtype(tmp_path: Path, lengths: list[int], codec: str, num_aux: int,
                                                       limit: int) -> None:
    of = layout(codec, num_aux)
    rows = [random_row(f"r{i}", length, of, seed=i) for i, length in enumerate(lengths)]
    directory = tmp_path / str(next(COUNTER))
    writer = FeatureWriter(directory, of)
    for shard in plan_shards(lengths, of, limit):
        writer.write_shard([rows[i] for i in shard])
    store = FeatureStore(directory)
    store.verify()
    assert (store.num_rows, store.num_tokens, store.lengths) == (len(rows), sum(lengths), lengths)
    assert store.row_ids == [row.row_id for row in rows]
    for i in reversed(range(len(rows))):
        back = store.row(i)
        assert back.row_id == rows[i].row_id
        assert torch.equal(back.token_ids, rows[i].token_ids)
        assert torch.equal(back.loss_mask, rows[i].loss_mask)
        assert torch.equal(back.aux, rows[i].aux.to(of.dtype))
        assert torch.equal(back.last, rows[i].last.to(of.dtype))


@given(lengths=st.lists(st.integers(1, 500), max_size=60), limit=st.integers(1, 200_000))
def test_a_shard_plan_covers_every_row_once_and_keeps_the_size_limit(lengths: list[int], limit: int) -> None:
    of = layout()
    plan = list(plan_shards(lengths, of, limit))
    assert [i for shard in plan for i in shard] == list(range(len(lengths)))
    for shard in plan:
        assert len(shard) == 1 or sum(of.row_bytes(lengths[i]) for i in shard) <= limit


def test_bytes_per_token_is_what_the_files_weigh(tmp_path: Path) -> None:
    of = layout("bfloat16", hidden=64)
    writer = FeatureWriter(tmp_path, of)
    shard = writer.write_shard([random_row("a", 1000, of)])
    header = 1000
    assert of.row_bytes(1000) <= shard.size_bytes <= of.row_bytes(1000) + header


def test_a_shard_not_yet_in_the_index_is_written_again_to_the_same_bytes(tmp_path: Path) -> None:
    of = layout()
    rows = [random_row(f"r{i}", 10 + i, of, seed=i) for i in range(4)]
    whole = FeatureWriter(tmp_path / "whole", of)
    for row in rows:
        whole.write_shard([row])

    broken = tmp_path / "broken"
    first = FeatureWriter(broken, of)
    first.write_shard([rows[0]])
    index_before = (broken / INDEX).read_bytes()
    first.write_shard([rows[1]])
    # What a kill leaves between the rename and the index, and in the middle of a shard:
    (broken / INDEX).write_bytes(index_before)
    (broken / ".shard-00002.safetensors.part").write_bytes(b"half")
    (broken / ".index.json.abcdefgh").write_bytes(b"half")
    again = FeatureWriter(broken, of)
    assert again.row_ids == ["r0"]
    for row in rows[again.num_rows:]:
        again.write_shard([row])
    one, other = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path / "whole", broken))
    assert one == other


def test_verify_names_the_shard_whose_bytes_changed(tmp_path: Path) -> None:
    of = layout()
    writer = FeatureWriter(tmp_path, of)
    for i in range(3):
        writer.write_shard([random_row(f"r{i}", 10, of, seed=i)])
    path = tmp_path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match="shard-00001"):
        FeatureStore(tmp_path).verify()


def test_a_cut_or_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    of = layout()
    FeatureWriter(tmp_path, of).write_shard([random_row("a", 10, of)])
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactCorrupt, match="shard-00000"):
        FeatureStore(tmp_path)
    with pytest.raises(ArtifactCorrupt, match="shard-00000"):
        FeatureWriter(tmp_path, of)
    path.unlink()
    with pytest.raises(ArtifactMissing, match="shard-00000"):
        FeatureStore(tmp_path)


def test_a_directory_without_an_index_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissing, match="run capture first"):
        FeatureStore(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ArtifactCorrupt):
        FeatureStore(tmp_path)


def test_states_of_another_layout_are_refused(tmp_path: Path) -> None:
    FeatureWriter(tmp_path, layout())
    with pytest.raises(Conflict, match="codec: float32 instead of bfloat16"):
        FeatureWriter(tmp_path, layout("bfloat16"))


def test_a_row_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, layout())
    with pytest.raises(ValueError, match="aux has shape"):
        writer.write_shard([random_row("a", 5, layout(num_aux=2))])


def test_rows_outside_the_store_raise_index_error(tmp_path: Path) -> None:
    of = layout()
    FeatureWriter(tmp_path, of).write_shard([random_row("a", 5, of)])
    with pytest.raises(IndexError):
        FeatureStore(tmp_path).row(1)
    with pytest.raises(IndexError):
        FeatureStore(tmp_path).row(-1)

"""However a trainer is fed, from a store or by the target as it goes, it sees the same numbers in the same order."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.contract.capture import Codec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, InvalidInput
from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow, supervised_positions
from eyrie_workers.hidden_states.storage_backend import LocalBackend
from eyrie_workers.hidden_states.streaming import (
    TOKENS,
    StreamedFeatures,
    compute_pass,
    read_plan,
    write_plan,
)
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.targets.loading import load_target, target_digest
from eyrie_workers.training.batches import BatchLoader, Features, Schedule, open_features
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext
from tests.feature_rows import FeatureRow, write_shard
from tests.tiny import tiny_target
from tests.workers.independent_rows import INDEPENDENT_ROWS

AUX_LAYERS = (1, 2, 3)
HIDDEN = 32


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def rows_of(num: int) -> list[tuple[str, torch.Tensor, int]]:
    """Ids, tokens, and how many of these are prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 60, (num,), generator=generator).tolist()
    return [(f"row-{i}", torch.randint(60, (length,), generator=generator), length // 3)
            for i, length in enumerate(lengths)]


def both(directory: Path, target_dir: Path, codec: Codec, num: int = 14, *, opinions: bool = False,
         buffer_bytes: int = 2**20) -> tuple[Features, Features]:
    """The same rows as a store and as a stream; every row of the store had a pass of its own."""
    target = load_target(target_dir, "float32")
    topk: dict[str, Any] = {"final_state": "topk", "top_k": 4, "draft_ids": tuple(range(0, 60, 2))} if opinions else {}
    layout = StoreFormat(aux_layers=AUX_LAYERS, hidden_size=HIDDEN, codec=codec,
                         target_digest=target_digest(target_dir), **topk)
    rows = rows_of(num)
    writer = FeatureWriter(directory / "store", layout)
    stored = []
    for name, ids, prompt in rows:
        row = TokenRow(name, ids, torch.arange(ids.numel()) >= prompt)
        alone = compute_pass(target, [row], layout)
        stored.append(FeatureRow(*row, alone.aux, alone.last, alone.topk_logits))
    write_shard(writer, stored)
    writer.finish()
    (directory / "stream").mkdir()
    write_plan(directory / "stream", layout, ((name, ids.tolist(), prompt) for name, ids, prompt in rows),
               source="reference", batch_tokens=100, buffer_bytes=buffer_bytes)
    spec = TargetSpec(model=str(target_dir))
    return open_features(str(directory / "store"), spec), open_features(str(directory / "stream"), spec)


def schedule_of(features: Features) -> Schedule:
    return Schedule(range(features.num_rows), features.lengths, max_tokens=160, epochs=2, seed=0)


@INDEPENDENT_ROWS
@pytest.mark.parametrize(("codec", "opinions"), [("float32", False), ("bfloat16", False), ("int8", False),
                                                 ("int4", False), ("bfloat16", True)])
def test_a_stream_gives_what_a_store_gives_bit_for_bit(
        tmp_path: Path, target_dir: Path, codec: Codec, opinions: bool) -> None:
    store, stream = both(tmp_path, target_dir, codec, opinions=opinions)
    assert stream.lengths == store.lengths
    schedule = schedule_of(store)
    loaders = BatchLoader(schedule, store), BatchLoader(schedule, stream)
    for step in range(schedule.num_steps):
        one, other = (loader.take(step) for loader in loaders)
        assert (one.plan, one.starts, one.num_tokens) == (other.plan, other.starts, other.num_tokens)
        mine, theirs = one.documents, other.documents
        assert mine.lengths == theirs.lengths == tuple(store.lengths[row] for row in one.plan.rows)
        for name in ("token_ids", "loss_mask", "aux", "last"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert (mine.topk_logits is None) == (not opinions)
        if mine.topk_logits is not None and theirs.topk_logits is not None:
            for name in ("ids", "logits", "tail", "mass", "choice"):
                assert torch.equal(getattr(mine.topk_logits, name), getattr(theirs.topk_logits, name)), name
        else:
            taught = torch.cat([supervised_positions(mask) for mask in torch.split(mine.loss_mask, list(mine.lengths))])
            assert not bool(mine.last[~taught].any())
            assert bool(mine.last[taught].any())
    for loader in loaders:
        loader.close()


def test_a_feed_that_begins_in_the_middle_gives_the_batches_of_one_that_came_there(
        tmp_path: Path, target_dir: Path) -> None:
    for features in both(tmp_path, target_dir, "float32"):
        schedule = schedule_of(features)
        whole = BatchLoader(schedule, features)
        aux = [whole.take(step).documents.aux.clone() for step in range(schedule.num_steps)]
        begun = BatchLoader(schedule, features)
        for step in (3, 4, 1, 2):  # ahead, and back
            assert torch.equal(begun.take(step).documents.aux, aux[step])
        whole.close()
        begun.close()


def test_the_processes_of_a_world_share_a_step_whichever_way_they_are_fed(tmp_path: Path, target_dir: Path) -> None:
    store, stream = both(tmp_path, target_dir, "float32", num=5)
    schedule = Schedule(range(5), store.lengths, max_tokens=60, epochs=1, seed=0)
    alone = BatchLoader(schedule, store, SINGLE_PROCESS)
    parts = [[BatchLoader(schedule, features, DistContext(rank, 2)) for rank in (0, 1)] for features in (store, stream)]
    idle = 0
    for step in range(schedule.num_steps):
        whole = alone.take(step)
        for loaders in parts:
            batches = [loader.take(step) for loader in loaders]
            assert sum(batch.num_tokens for batch in batches) == whole.num_tokens
            for batch in batches:
                idle += batch.num_tokens == 0
                assert batch.num_tokens or not bool(batch.documents.loss_mask.any())
                at = 0
                for start, length in zip(batch.starts, batch.documents.lengths, strict=True):
                    mine, all_of_it = batch.documents.aux[at:at + length], whole.documents.aux[start:start + length]
                    assert torch.equal(mine, all_of_it) or not batch.num_tokens
                    at += length
    assert idle  # some steps had fewer documents than processes
    for loader in (alone, *parts[0], *parts[1]):
        loader.close()


def test_the_stream_holds_no_more_states_than_its_buffer(tmp_path: Path, target_dir: Path) -> None:
    store, _ = both(tmp_path, target_dir, "float32")
    batches = [range(i, i + 2) for i in range(0, 14, 2)]
    sizes = [sum(store.lengths[row] for row in rows) * 4 * HIDDEN * 4 for rows in batches]
    found = read_plan(LocalBackend(tmp_path / "stream"))
    assert found is not None
    for room, ahead in ((2 * max(sizes), 5), (1, 5), (sum(sizes), 2)):
        stream = StreamedFeatures(found[0].model_copy(update={"buffer_bytes": room}), found[1],
                                  lambda: load_target(target_dir, "float32"))
        seen = 0
        for rows, batch in zip(batches, stream.batches(batches, ahead=ahead), strict=True):
            assert batch.lengths == tuple(store.lengths[row] for row in rows)
            seen += sum(batch.lengths)
            assert (stream.computed_tokens - seen) * 4 * HIDDEN * 4 <= max(0, room - sizes[batches.index(rows)])
        assert max(sizes) <= stream.most_held_bytes <= max(room, max(sizes))
        assert stream.computed_tokens == seen == sum(store.lengths)
        if room > 1:
            assert stream.most_held_bytes > max(sizes)  # it did go ahead


def test_a_target_device_that_does_not_exist_is_refused_before_anything_is_computed(
        tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both(tmp_path, target_dir, "float32", num=2)
    monkeypatch.setenv("EYRIE_TARGET_DEVICE", "cuda:63")
    with pytest.raises(InvalidInput, match="EYRIE_TARGET_DEVICE 'cuda:63'"):
        open_features(str(tmp_path / "stream"), TargetSpec(model=str(target_dir)))
    monkeypatch.setenv("EYRIE_TARGET_DEVICE", "cpu")
    assert open_features(str(tmp_path / "stream"), TargetSpec(model=str(target_dir))).num_rows == 2


def test_a_plan_whose_tokens_are_not_its_own_is_refused(tmp_path: Path, target_dir: Path) -> None:
    both(tmp_path, target_dir, "float32", num=2)
    place = LocalBackend(tmp_path / "stream")
    assert read_plan(place) is not None
    with (tmp_path / "stream" / TOKENS).open("r+b") as file:
        file.write(b"\x07")
    with pytest.raises(ArtifactCorrupt, match=TOKENS):
        open_features(str(tmp_path / "stream"), TargetSpec(model=str(target_dir)))

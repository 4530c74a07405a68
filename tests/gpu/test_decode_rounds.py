"""Decoding on a GPU: how often a round waits for the device, and what the drafters' caches hold.

The GPU is pretended (`pretended`): its counter follows the rules of `torch.cuda.set_sync_debug_mode`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.gpu.pretended import GPU, PretendedGpu
from tests.gpu.test_pretended import NAMES, SHAPES, made
from tests.tiny import tiny_target

SAMPLINGS = [SamplingSpec(temperature=0.0), SamplingSpec(temperature=0.8, top_p=0.9, top_k=40)]
CONTEXT = 4096


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny", seed=5, initializer_range=0.15,
                       max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def exports(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of every family, by name."""
    root = tmp_path_factory.mktemp("drafters")
    for name in NAMES:
        drafter, _ = made(name, target_dir, read_target_embeddings(target_dir, False))
        family_named(name).save(root / name, drafter, "float32", None)
    return root


def opened(name: str, exports: Path, target: TargetModel) -> Drafter:
    return NgramDrafter() if name == "ngram" else open_drafter(exports / name, target)


# One row takes other paths than several, and a chain in float32 another than in bfloat16.
@pytest.mark.parametrize(("name", "num_rows", "dtype"), [
    *((name, 2, "float32") for name in ("ngram", *NAMES)), ("ngram", 1, "float32"), ("eagle3", 1, "float32"),
    *(pytest.param(name, 1, "float32", marks=pytest.mark.slow) for name in NAMES if name != "eagle3"),
    ("eagle3", 1, "bfloat16")])
def test_the_host_waits_for_the_device_once_per_round(name: str, num_rows: int, dtype: str, gpu: PretendedGpu,
                                                      target_dir: Path, exports: Path) -> None:
    target = load_target(target_dir, dtype, GPU)
    engine = Engine(target, opened(name, exports, target), max_concurrency=num_rows)
    for shape in SHAPES:
        for sampling in SAMPLINGS:
            engine.tree = shape
            for n in range(num_rows):  # repeating text, so that n-grams match; rows of several lengths
                engine.submit(Request(str(n), [*range(5, 9 + n)] * 3, 4, sampling, seed=n))
            engine.step()  # admits, then the first round
            while engine.num_running:
                before = gpu.num_syncs
                engine.step()
                assert gpu.num_syncs - before == 1, (shape.label(), sampling, gpu.syncs[before:])


def test_a_round_of_greedy_and_sampled_rows_where_some_cannot_draft_waits_once_too(
        gpu: PretendedGpu, target_dir: Path, exports: Path) -> None:
    target = load_target(target_dir, "float32", GPU)
    drafter: Any = open_drafter(exports / "medusa", target)
    drafter.max_length = 30  # the second request is longer
    engine = Engine(target, drafter, max_concurrency=2, tree=SHAPES[1])
    for n, sampling in enumerate(SAMPLINGS):
        engine.submit(Request(str(n), [7, 8, 9] * (4 + 6 * n), 8, sampling))
    engine.step()
    before = gpu.num_syncs
    engine.step()
    assert gpu.num_syncs - before == 1, gpu.syncs[before:]


def held_bytes(value: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    inner = vars(value).values() if hasattr(value, "__dict__") else value if isinstance(value, list | dict) else ()
    return sum(held_bytes(one) for one in inner)


def held_after(drafter: Drafter, target: TargetModel, num_tokens: int, shapes: list[DraftTreeShape]) -> int:
    """Bytes of the engine's drafter state after answers with all of these shapes."""
    engine = Engine(target, drafter, max_concurrency=2)
    for shape in shapes:
        engine.generate([Request(str(n), [7, 8, 9], num_tokens) for n in range(2)], shape)
    return held_bytes(vars(engine)["_drafter_state"])


@pytest.mark.parametrize("name", NAMES)
def test_a_drafters_cache_follows_the_text_and_not_the_context_or_the_shapes_tried(
        name: str, target_dir: Path, exports: Path) -> None:
    target = load_target(target_dir)
    drafter = open_drafter(exports / name, target)
    many = [DraftTreeShape(num_steps=steps, top_k=1, num_draft_tokens=steps + 1) for steps in range(1, 6)]
    short = held_after(drafter, target, 6, many[:1])
    assert held_after(drafter, target, 6, [*many, *SHAPES]) == short
    assert short < 2 * CONTEXT * 2 * 2 * 8 * 4  # two rows' keys and values of the whole context, in one layer


def test_a_cache_that_grew_drafts_as_one_that_was_long_from_the_start(target_dir: Path, exports: Path) -> None:
    target, shape = load_target(target_dir), SHAPES[1]
    prompt = torch.randint(3, 320, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    histograms = []
    for name in ("eagle3", "standalone", "dflash"):
        drafter: Any = open_drafter(exports / name, target)
        for long in (False, True):
            engine = Engine(target, drafter, max_concurrency=2, tree=shape)
            if long:  # grows the state before the text that is looked at
                engine.generate([Request("long", prompt * 3, 4)], shape)
            [answer] = engine.generate([Request("a", prompt, 20)], shape)
            histograms.append((name, answer.token_ids, answer.accepted_histogram))
    assert histograms[::2] == histograms[1::2]

"""What loading and a forward pass of a target hold at the worst moment."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyrie_api.errors import MemoryTooSmall
from eyrie_workers.targets.causal_attention import causal
from eyrie_workers.targets.device import _left_of_limit
from eyrie_workers.targets.loading import load_target, require_memory
from tests.live_bytes import LiveBytes
from tests.tiny import tiny_target


@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_loading_holds_no_more_than_the_weights_and_one_layer(
        family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_target(tmp_path / "target", family, num_layers=6)
    # oneDNN's packed weights hide their memory; without it the weights are plain tensors, as on a GPU.
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    sizes = {name: tensor.numel() * 2 for name, tensor in load_file(path / "model.safetensors").items()}
    weights, layer = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)
    # In another dtype than the file's: every tensor that is read is then memory of this process.
    with LiveBytes() as tensors:
        target = load_target(path, "bfloat16", torch.device("cpu"))
    # Beyond the file's tensors a model has its rotary frequencies and a head norm per head instead of one for all.
    assert weights <= tensors.live <= 1.02 * weights
    assert tensors.peak <= tensors.live + layer < 1.3 * weights
    assert target.dtype == torch.bfloat16


def heads(length: int, queries: int = 4, groups: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(length, queries + 2 * groups, size, generator=generator).split([queries, groups, groups], 1)
    return q, k, v


def masked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The definition: a T x T mask."""
    ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("tqe,sqe->qts", q, k).double() / q.shape[2]**0.5
    weights = scores.masked_fill((ages < 0) | (ages >= window), -torch.inf).softmax(-1)
    return torch.einsum("qts,sqe->tqe", weights, v.double()).flatten(1).to(q.dtype)


@pytest.mark.parametrize(("length", "window"), [(90, 7), (8, 7), (64, 16), (33, 32), (5, 1), (17, 40), (17, 17)])
def test_windowed_attention_equals_the_masked_definition(length: int, window: int) -> None:
    q, k, v = heads(length)
    torch.testing.assert_close(causal(q, k, v, window), masked(q, k, v, window), atol=1e-6, rtol=1e-5)


def peak_of(length: int, window: int | None) -> int:
    q, k, v = heads(length)
    with torch.inference_mode(), LiveBytes() as tensors:
        causal(q, k, v, window)
    return tensors.peak


def test_memory_of_a_window_grows_with_the_text_times_the_window() -> None:
    short, long = peak_of(512, 64), peak_of(4096, 64)
    assert long <= 8.5 * short  # with a T x T mask 64 times
    assert long < 4096 * 4096


def test_weights_that_no_memory_here_holds_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target")
    # A sparse file: the header of a model of 8 TB, without its bytes.
    rows = 2**32
    header = json.dumps({"model.embed_tokens.weight": {
        "dtype": "BF16", "shape": [rows, 1024], "data_offsets": [0, rows * 2048]}}).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * 2048)
    with pytest.raises(MemoryTooSmall, match=r"weights take 17592.2 GB in float32, and cpu has \d+\.\d GB") as caught:
        load_target(path, "float32", torch.device("cpu"))
    assert "target.dtype to bfloat16" in caught.value.hint


@pytest.mark.parametrize(("free", "refused"), [(None, False), (100, False), (99, True)])
def test_memory_is_compared_with_the_weights_where_it_is_known(free: int | None, refused: bool) -> None:
    with pytest.raises(MemoryTooSmall) if refused else nullcontext():
        require_memory("cuda:1", 100, free, "bfloat16")


@pytest.mark.parametrize(("limit", "left"), [("max", None), ("1000", 1000 - 700 + 50)])
def test_a_control_groups_limit_counts_its_page_cache_as_free(limit: str, left: int | None, tmp_path: Path) -> None:
    for name, text in (("max", limit), ("current", "700"), ("stat", "anon 600\ninactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert _left_of_limit(tmp_path) == left
    assert _left_of_limit(tmp_path / "none") is None

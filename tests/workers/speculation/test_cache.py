import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eyrie_workers.speculation.cache import KVCache, grown
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target


def test_a_cache_keeps_its_contents_and_a_ninth_of_it_at_most_is_unused() -> None:
    cache = torch.zeros(2, 256, 1)
    lengths = [256]
    for length in range(1, 20_000, 37):
        held = cache.shape[1]
        cache = grown(cache, 1, length)
        if cache.shape[1] != held:
            lengths.append(cache.shape[1])
        cache[:, length - 1] = length
        assert cache.shape[1] - length <= max(255, length // 8)
    assert len(lengths) < 40
    assert cache[1, :19_981:37, 0].tolist() == list(range(1, 19_982, 37))


class LivingBytes(TorchDispatchMode):
    """Bytes of storages that operations have allocated and that still exist; the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default):
            self.now += made.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(made.untyped_storage(), self._freed, made.nbytes)
        return made

    def _freed(self, size: int) -> None:
        self.now -= size


def test_growing_the_cache_of_a_target_takes_the_memory_of_a_few_layers_and_not_of_all(tmp_path: Path) -> None:
    config = read_config(tiny_target(tmp_path / "target", num_layers=30))
    with LivingBytes() as living:
        cache = KVCache(config, 3, torch.float64, torch.device("cpu"))
        for layer in range(30):
            cache.layer(layer)[1, 200] = layer
        cache.reserve(1000)
    whole = 30 * 3 * 1000 * 2 * config.num_kv_heads * config.head_dim * 8
    assert living.now == whole
    assert living.most <= whole + whole * 4 / 30
    assert [int(cache.layer(layer)[1, 200, 0, 0]) for layer in range(30)] == list(range(30))


def test_a_loaded_target_holds_no_pages_of_its_files(tmp_path: Path) -> None:
    target = load_target(tiny_target(tmp_path / "target"))
    assert target.embed_weight.untyped_storage().nbytes() == target.embed_weight.nbytes
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()

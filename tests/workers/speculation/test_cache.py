import torch

from eyrie_workers.speculation.cache import grown


def test_a_cache_keeps_its_contents_and_holds_at_most_4096_unused_positions() -> None:
    cache = torch.zeros(2, 256, 1)
    lengths = [256]
    for length in range(1, 20_000, 37):
        held = cache.shape[1]
        cache = grown(cache, 1, length)
        if cache.shape[1] != held:
            lengths.append(cache.shape[1])
        cache[:, length - 1] = length
        assert cache.shape[1] - length <= max(255, min(length, 4096))
    assert lengths[:6] == [256, 512, 1024, 2048, 4096, 8192]  # few copies while texts are short
    assert len(lengths) < 12
    assert cache[1, :19_981:37, 0].tolist() == list(range(1, 19_982, 37))

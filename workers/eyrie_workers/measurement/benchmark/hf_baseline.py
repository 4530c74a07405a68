"""The honesty check: is our undrafted engine at least as fast as the one everybody has?

A speed-up over a slow baseline is worth nothing. So the same prompts are answered greedily by `transformers` generate
with its cache, at the same dtype and thread count, interleaved with our engine undrafted; both are timed whole, prefill
included. `transformers` is imported only here, because importing it takes longer than a small benchmark.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_workers.interleaving import interleaved
from eyrie_workers.measurement.benchmark.samples import BASELINE, Variant
from eyrie_workers.measurement.benchmark.variants import Bench, Unit


@dataclass(frozen=True)
class Honesty:
    """Tokens per second of both engines on the same prompts."""

    ours: float
    transformers: float
    tokens: int
    transformers_tokens: int


def compare(bench: Bench, target_path: Path, dtype: str, units: Sequence[Unit], between: Callable[[], None]) -> Honesty:
    """Time both engines on greedy `units`, alternating which begins."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        target_path, dtype=getattr(torch, dtype), local_files_only=True).eval()
    baseline = Variant(None)
    bench.warm_up(units[:1], [baseline], between)
    _generate(model, units[0], bench.stop_ids, 8)
    ours_tokens = theirs_tokens = 0
    ours_s = theirs_s = 0.0
    for turn, unit in enumerate(units):
        for engine in interleaved(("ours", "theirs"), turn):
            between()
            if engine == "ours":
                sample = bench.measure(unit, [baseline], between).samples[BASELINE]
                ours_tokens, ours_s = ours_tokens + len(sample.token_ids), ours_s + sample.seconds
            else:
                started = time.perf_counter()
                theirs_tokens += _generate(model, unit, bench.stop_ids, bench.max_new_tokens)
                theirs_s += time.perf_counter() - started
    return Honesty(ours=ours_tokens / ours_s, transformers=theirs_tokens / theirs_s, tokens=ours_tokens,
                   transformers_tokens=theirs_tokens)


def _generate(model: "torch.nn.Module", unit: Unit, stop_ids: Sequence[int], max_new_tokens: int) -> int:
    """Answer greedily with `transformers`; returns the number of new tokens, the stop token counted as in ours."""
    prompt = torch.tensor([unit.prompt_ids])
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            use_cache=True, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0] if stop_ids else 0)
    return int(answer.shape[1] - prompt.shape[1])

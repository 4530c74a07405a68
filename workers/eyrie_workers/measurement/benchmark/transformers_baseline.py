"""The undrafted engine against `transformers` generate: a speed-up over a slow baseline means nothing.

`transformers` generate, with its KV cache and at the same dtype and thread count, and our engine without a drafter
answer the same prompts greedily, in turn. Both are timed over the whole request, prefill included. The two rates are
comparable with each other only: the benchmark's other figures come from other prompts and temperatures. Both models
are on one device at once; the caller leaves the comparison out where that has no room for them (`fits`).

`transformers` is imported here alone, because the import takes longer than a small benchmark.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_workers.interleaving import interleaved
from eyrie_workers.measurement.benchmark.samples import BASELINE, UNDRAFTED
from eyrie_workers.measurement.benchmark.variants import Bench, Unit
from eyrie_workers.targets.loading import weight_files
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.state_source import load_causal_model


@dataclass(frozen=True)
class TransformersBaseline:
    """Tokens per second of both engines on the same prompts."""

    tokens_per_s: float
    """Our engine without a drafter."""

    transformers_tokens_per_s: float
    tokens: int
    transformers_tokens: int
    prompts: int


def fits(target: TargetModel) -> bool:
    """Whether the GPU of our target has room for a second copy of its weights; always on the CPU."""
    if target.device.type != "cuda" or target.path is None:
        return True
    free, _ = torch.cuda.mem_get_info(target.device)
    return free > sum(file.stat().st_size for file in weight_files(target.path))


def compare(bench: Bench, target: TargetModel, target_path: Path, dtype: str, units: Sequence[Unit],
            between: Callable[[], None]) -> TransformersBaseline:
    """Time both engines on greedy `units`, interleaved. `between` is called before each answer and may raise."""
    model = load_causal_model(target_path, dtype, target.device)
    bench.warm_up(units[:1], [UNDRAFTED], between)
    _generate(model, units[0], bench.stop_ids, 8)
    tokens = transformers_tokens = 0
    seconds = transformers_s = 0.0
    for turn, unit in enumerate(units):
        for engine in interleaved(("ours", "transformers"), turn):
            between()
            if engine == "ours":
                sample = bench.measure(unit, [UNDRAFTED], between).samples[BASELINE]
                tokens, seconds = tokens + len(sample.token_ids), seconds + sample.seconds
            else:
                started = time.perf_counter()
                transformers_tokens += _generate(model, unit, bench.stop_ids, bench.max_new_tokens)
                transformers_s += time.perf_counter() - started
    return TransformersBaseline(
        tokens_per_s=tokens / seconds, transformers_tokens_per_s=transformers_tokens / transformers_s, tokens=tokens,
        transformers_tokens=transformers_tokens, prompts=len(units))


def _generate(model: "torch.nn.Module", unit: Unit, stop_ids: Sequence[int], max_new_tokens: int) -> int:
    """Answer greedily with `transformers`; returns the number of new tokens, the stop token counted as in ours."""
    prompt = torch.tensor([unit.prompt_ids], device=next(model.parameters()).device)
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            use_cache=True, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0] if stop_ids else 0)
    return int(answer.shape[1] - prompt.shape[1])

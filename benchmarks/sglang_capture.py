"""Cost of capturing hidden states through SGLang, against SGLang's own prefill of the same tokens.

    python -m benchmarks.sglang_capture --out .eyrie/bench/sglang-capture.json [--target quickstart] [--rounds 9]

Two servers with the same arguments, one of which captures. Each round gives the same texts to both, in an order that
alternates; the capturing one's states are read, the other answers one token per text, as capture's requests do.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path

import torch

from eyrie_api.artifacts import write_atomically
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_workers.sglang.capture_states import SglangStates
from eyrie_workers.sglang.servers import ServerPlan, ServerPool
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.config import choose_aux_layers, read_config
from eyrie_workers.targets.loading import resolve


def main() -> int:
    """Run the rounds; returns the exit code."""
    parser = argparse.ArgumentParser(description="Capture through SGLang against SGLang's prefill.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    options = parser.parse_args()
    target = TargetSpec(model=options.target, dtype=options.dtype)
    config = read_config(resolve(target))
    layers = choose_aux_layers(config.num_layers, config.layer_types).aux_layers
    plan, work = ServerPlan("sglang", target, options.texts), options.out.parent / f"{options.out.stem}.work"
    generator, seconds = torch.Generator().manual_seed(0), {"capture": list[float](), "prefill": list[float]()}
    # Both servers have the same context length, and so the same memory pool.
    uses = {"prefill": DrafterUse(context_length=options.tokens + 8)}
    pool = ServerPool(plan, uses, work, Stage(work), capacity=1)
    with contextlib.ExitStack() as opened:
        opened.callback(pool.stop)
        url = pool.server("prefill").url
        source = opened.enter_context(SglangStates(plan, layers, options.tokens, work / "captured", Stage(work)))
        for number in range(options.rounds + 1):
            texts = [torch.randint(3, config.vocab_size, (options.tokens,), generator=generator)
                     for _ in range(options.texts)]
            for name in sorted(seconds, reverse=number % 2 == 1):
                began = time.perf_counter()
                if name == "capture":
                    source.packed_states(texts, layers)
                else:
                    _flush(url)
                    began = time.perf_counter()
                    _prefill(url, texts)
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - began)
    ratios = [one / other for one, other in zip(seconds["capture"], seconds["prefill"], strict=True)]
    report = {"target": options.target, "dtype": options.dtype, "texts": options.texts, "tokens": options.tokens,
              "aux_layers": layers, "seconds": seconds, "ratio": statistics.median(ratios),
              "ratios": [round(one, 3) for one in sorted(ratios)],
              "capture_tokens_per_s": options.texts * options.tokens / statistics.median(seconds["capture"])}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(report, indent=1) + "\n")
    print(f"capture takes {report['ratio']:.2f} times SGLang's prefill of the same tokens (pairs {report['ratios']}), "
          f"{report['capture_tokens_per_s']:.0f} tokens/s")
    return 0


def _prefill(url: str, texts: list[torch.Tensor]) -> None:
    body = json.dumps({"input_ids": [text.tolist() for text in texts],
                       "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        answer.read()


def _flush(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache?timeout=60", method="POST"), timeout=90.0):
        pass


if __name__ == "__main__":
    sys.exit(main())

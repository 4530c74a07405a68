"""What a token costs here: `python -m benchmarks.decode --target DIR [--drafter DIR] [--at-once N]`.

Prints the numbers that decide whether drafting can pay on this machine: plain decoding against `transformers` generate
(same weights, dtype, threads, prompts; alternating, so that a slow minute hits both; N prompts at once), the cost of
verifying some tokens against one, and with a drafter its cost per round, acceptance length and speed-up. CPU seconds of
this process are printed next to wall seconds: on a busy machine they are the steadier of the two.

A bench, not a test: nothing here decides anything.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.measure.intervals import interleaved
from eyrie_workers.speculation.cache import TreeAttention
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

_SUITES = Path(__file__).resolve().parents[1] / "workers" / "eyrie_workers" / "quickstart" / "suites"
_SHAPES = (DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6),
           DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8),
           DraftTreeShape(num_steps=5, top_k=4, num_draft_tokens=16))


def _timed(work: Callable[[], int]) -> tuple[int, float, float]:
    """Run it: what it returns (tokens), wall seconds, CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    num_tokens = work()
    return num_tokens, time.perf_counter() - wall, time.process_time() - cpu


def _rate(samples: list[tuple[int, float, float]]) -> str:
    tokens = sum(sample[0] for sample in samples)
    wall, cpu = sum(sample[1] for sample in samples), sum(sample[2] for sample in samples)
    return f"{tokens / wall:8.1f} tok/s wall {tokens / cpu:8.1f} tok/s CPU"


def read_prompts(directory: Path, suites: list[Path], num_prompts: int) -> tuple[list[list[int]], tuple[int, ...]]:
    """Rendered prompts, taking turns between the suites, and the target's end tokens."""
    tokenizer = ChatTokenizer(directory)
    rows = [[json.loads(line) for line in suite.read_text().splitlines()] for suite in suites]
    mixed = [row for turn in zip(*rows, strict=False) for row in turn][:num_prompts]
    return [tokenizer.render(row["messages"], row.get("tools")) for row in mixed], tokenizer.eos_ids


def bench_baseline(target: TargetModel, prompts: list[list[int]], num_tokens: int, at_once: int) -> None:
    """Plain decoding here against `transformers` generate, alternating batch by batch of so many prompts."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype).eval()
    engine = Engine(target, max_concurrency=at_once)

    def ours(batch: list[list[int]]) -> int:
        requests = [Request(str(number), prompt, num_tokens) for number, prompt in enumerate(batch)]
        return sum(len(answer.token_ids) for answer in engine.generate(requests))

    def generate(batch: list[list[int]]) -> int:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                                  do_sample=False, use_cache=True, pad_token_id=0)
        return (int(out.shape[1]) - longest) * len(batch)

    batches = [prompts[start: start + at_once] for start in range(0, len(prompts), at_once)]
    ours(batches[0])
    generate(batches[0])
    engines = {"ours": ours, "transformers": generate}
    samples: dict[str, list[tuple[int, float, float]]] = {name: [] for name in engines}
    for turn, batch in enumerate(batches):
        for name in interleaved(list(engines), turn):
            samples[name].append(_timed(lambda name=name, batch=batch: engines[name](batch)))  # type: ignore[misc]
    for name, taken in samples.items():
        print(f"plain decoding, {at_once} at once, {name:14s} {_rate(taken)}")


def bench_verify(target: TargetModel, context: int, repeats: int = 30) -> None:
    """Milliseconds of one target pass over N tokens behind `context` settled ones."""
    engine = Engine(target)
    engine._cache.reserve(context + 64)
    one = 0.0
    for num_nodes in (1, 2, 4, 6, 8, 12, 16, 24, 32):
        tokens = torch.zeros(num_nodes, dtype=torch.int64)
        depths = torch.arange(num_nodes)[None]

        def verify(tokens: torch.Tensor = tokens, depths: torch.Tensor = depths) -> int:
            with torch.inference_mode():
                attend = TreeAttention(engine._cache, torch.tensor([context]), None, depths, target.dtype, context)
                target.logits(target.run(tokens, context + depths[0], attend)[1])
            return 1

        times = [_timed(verify) for _ in range(repeats)]
        wall, cpu = median(t[1] for t in times) * 1e3, median(t[2] for t in times) * 1e3
        one = one or wall
        print(f"verify {num_nodes:3d} tokens behind {context}: {wall:7.2f} ms wall ({wall / one:.2f}x) "
              f"{cpu:7.2f} ms CPU")


def bench_drafter(target: TargetModel, directory: Path, prompts: list[list[int]], num_tokens: int,
                  stop_ids: tuple[int, ...]) -> None:
    """Every shape against the same engine undrafted, interleaved prompt by prompt."""
    from eyrie_workers.drafters.family import open_drafter

    engine = Engine(target, open_drafter(directory, target))
    for temperature in (0.0, 1.0):
        sampling = SamplingSpec(temperature=temperature)
        for shape in _SHAPES:
            samples: dict[DraftTreeShape | None, list[tuple[int, float, float]]] = {None: [], shape: []}
            rounds = same = 0
            spent = [0.0, 0.0]
            for number, prompt in enumerate(prompts):
                request = Request("bench", prompt, num_tokens, sampling, seed=number, stop_ids=stop_ids)
                texts: list[list[int]] = []
                for variant in interleaved((None, shape), number):
                    engine.stats.reset()

                    def work(variant: DraftTreeShape | None = variant, request: Request = request,
                             texts: list[list[int]] = texts) -> int:
                        texts.append(engine.generate([request], variant)[0].token_ids)
                        return len(texts[-1])

                    samples[variant].append(_timed(work))
                    if variant is not None:
                        rounds += engine.stats.rounds
                        spent[0] += engine.stats.draft_s
                        spent[1] += engine.stats.verify_s
                same += texts[0] == texts[1]
            plain, drafted = samples[None], samples[shape]
            tau = (sum(s[0] for s in drafted) - len(prompts)) / max(rounds, 1)
            wall = sum(s[1] for s in plain) / sum(s[1] for s in drafted)
            cpu = sum(s[2] for s in plain) / sum(s[2] for s in drafted)
            print(f"T={temperature} {shape.label():7s} tau {tau:.2f} speed-up {wall:.2f}x wall {cpu:.2f}x CPU, "
                  f"draft {spent[0] / rounds * 1e3:.2f} ms + verify {spent[1] / rounds * 1e3:.2f} ms per round, "
                  f"{same}/{len(prompts)} identical")


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="quickstart", help="model directory, Hub id or 'quickstart'")
    parser.add_argument("--drafter", type=Path, help="exported drafter directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--suite", type=Path, action="append", help="JSONL of conversations; default: the quickstart's")
    parser.add_argument("--prompts", type=int, default=8, help="prompts taken, evenly from the suites")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=1, help="prompts decoded at once in the comparison")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = resolve(TargetSpec(model=options.target))
    target = load_target(directory, options.dtype)
    config = target.config
    print(f"{config.family} {config.num_layers} x {config.hidden_size}, {options.dtype}, {options.threads} threads, "
          f"torch {torch.__version__}")
    prompts, stop_ids = read_prompts(directory, options.suite or sorted(_SUITES.glob("*.jsonl")), options.prompts)
    bench_baseline(target, prompts, options.tokens, options.at_once)
    bench_verify(target, 150)
    if options.drafter is not None:
        bench_drafter(target, options.drafter, prompts, options.tokens, stop_ids)


if __name__ == "__main__":
    main()

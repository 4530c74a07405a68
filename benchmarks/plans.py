"""Writes docs/results/plans.md: what `eyrie plan` says of jobs whose targets are too large for this machine, and of
those that this repository has run, next to what they took.

    python -m benchmarks.plans

The sizes of the targets are those of their published config.json, so that nothing is downloaded; lengths of the data
are given. A test compares the page with what the code says.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.artifacts.store_prices import STORES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan
from eyrie_api.contract.targets import QUICKSTART
from eyrie_api.planning.facts import data_facts, facts_of, target_dir, target_facts
from eyrie_api.planning.hardware import GPUS, fitting_sizes, gpu_rates, memory_of, served_memory
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_stages import ObjectStore
from eyrie_api.planning.plan_work import DataFacts, TargetFacts
from eyrie_api.planning.preflight import rates
from eyrie_api.planning.resolve import derive, with_declared_loads, with_gpu_defaults
from eyrie_api.planning.target_files import estimated_bytes
from eyrie_api.quantities import size
from eyrie_api.settings import Settings
from eyrie_operator.cli.demo import demo_job

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/results/plans.md"
PRICES = {"NVIDIA-H200": 4.0, "NVIDIA-H100-80GB-HBM3": 2.5}
"""Round numbers in dollars, to show the column; not an offer of anyone."""

LLAMA_8B = TargetFacts(hidden_size=4096, num_layers=32, vocab_size=128_256, intermediate_size=14_336, num_heads=32,
                       num_kv_heads=8, head_dim=128, tie_word_embeddings=False, source="config.json", dtype="bfloat16")
OLMO_32B = replace(LLAMA_8B, hidden_size=5120, num_layers=64, vocab_size=100_278, intermediate_size=27_648,
                   num_heads=40)
QWEN_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "vocab_size": 151_936, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
"""Of Qwen3-235B-A22B-FP8's config.json, what a plan depends on."""


LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, num_layers=80, intermediate_size=28_672, num_heads=64)
SMOLLM2 = replace(LLAMA_8B, hidden_size=576, num_layers=30, vocab_size=49_152, intermediate_size=1536, num_heads=9,
                  num_kv_heads=3, head_dim=64, tie_word_embeddings=True)
DEEPSEEK_671B: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129_280,
    "intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
"""The same of DeepSeek-V3."""


def served_by_sglang(config: dict[str, Any]) -> TargetFacts:
    """Facts of a quantised target of which config.json alone is here."""
    facts = facts_of(config, "config.json")
    return replace(facts, quantised_bytes=estimated_bytes(config, facts, "bfloat16", as_stored=True))


@dataclass(frozen=True)
class Job:
    """An example, and what a server with its target and data would know of them."""

    title: str
    example: str
    target: TargetFacts
    data: DataFacts
    gpu_type: str | None = None
    """Where the example leaves it to its one machine."""

    num_gpus: int = 1
    tp_size: int = 1

    store: ObjectStore | None = None
    """Where its stages exchange files; None: on its one machine."""

    def plan(self) -> Plan:
        """Its plan."""
        document = yaml.safe_load((ROOT / "docs/examples" / self.example).read_text())
        document["target"]["dtype"] = "bfloat16"
        if self.gpu_type is not None:
            document["placement"] = {"every": {"num_gpus": self.num_gpus, "gpu_type": self.gpu_type}}
            document["engine"] |= {"num_gpus": self.num_gpus, "tp_size": self.tp_size}
        spec = with_declared_loads(with_gpu_defaults(
            JobSpec.model_validate(document), has_sglang=True, num_gpus=self.num_gpus))
        return make_plan(derive(spec), self.target, None, data_facts=self.data, gpu_hour_prices=PRICES,
                         store=self.store)


H200 = "NVIDIA-H200"
DATA = DataFacts(20_000, 250.0, 500.0, "means assumed for this page")
JOBS = (
    Job("An 8B target on one H100", "one_gpu.yaml", LLAMA_8B, DATA, "NVIDIA-H100-80GB-HBM3"),
    Job("Qwen3-235B-A22B-FP8 on eight H200, four to a server", "one_gpu.yaml", served_by_sglang(QWEN_235B),
        DATA, H200, num_gpus=8, tp_size=4),
    Job("Olmo-3.1-32B-Think on eight H200", "olmo-3.1-32b.yaml", OLMO_32B,
        DataFacts(500_000, 1024.0, 1024.0, "2048 tokens a conversation, as in the post"),
        store=ObjectStore(STORES["aws-s3"], ranged=True, part_bytes=StoreOptions().part_size_bytes)),
)


SIX = {
    "SmolLM2-135M": SMOLLM2, "Llama-3.1-8B": LLAMA_8B, "Olmo-3.1-32B": OLMO_32B, "Llama-3.1-70B": LLAMA_70B,
    "Qwen3-235B-A22B-FP8": served_by_sglang(QWEN_235B), "DeepSeek-V3 (671B, FP8)": served_by_sglang(DEEPSEEK_671B)}


def smallest_server(target: TargetFacts) -> int:
    """The fewest H200 that hold a target's weights and divide it."""
    weights = target.quantised_bytes or 2 * target.parameters
    return next(size for size in fitting_sizes(target) if size * served_memory(memory_of(H200) or 0) >= weights)


def _six() -> str:
    rows = ["## Six targets, on one GPU and on eight\n",
            "The job of [examples/one_gpu.yaml](../examples/one_gpu.yaml) on H200, with the fewest GPUs to a\n"
            "server that hold the target, in hours; users that fit a server. A test computes every figure again from\n"
            "the formulas.\n",
            "| target | GPUs, of a server | regenerate | capture | train | benchmark | tune | prove | total | users |",
            "|---|---|---|---|---|---|---|---|---|---|"]
    for name, target in SIX.items():
        of_server = smallest_server(target)
        for num_gpus in (1, 8):
            if of_server > num_gpus:
                rows.append(f"| {name} | {num_gpus} | refused: `engine.tp_size` {of_server} or more | | | | | | | |")
                continue
            plan = Job(name, "one_gpu.yaml", target, DATA, H200, num_gpus, of_server).plan()
            hours = " | ".join(f"{stage.hours:.2f}" for stage in plan.stages)
            fit = "-" if plan.serving is None else f"{plan.serving.users_that_fit:,}"
            rows.append(f"| {name} | {num_gpus}, {of_server} | {hours} | {plan.total_hours:.2f} | {fit} |")
    return "\n".join(rows) + "\n"


DEMO_TOOK = {"regenerate": 69, "capture": 28, "train": 157, "benchmark": 53, "tune": 49, "prove": 70}
"""Seconds of `make demo`, 2026-11-29, commit 5b051484, alone on the machine (docs/results/demo.md)."""

PUBLISHED = {"regenerate": (1020, 842), "capture": (324, 317), "train": (1523, 1100), "benchmark": (574, 264),
             "tune": (634, 300), "prove": (1010, 439)}
"""Seconds planned and taken by `make demo-published`, 2026-11-29, commit 2afeb66c (docs/results/published.md). The
training is planned as it is now, with what a step takes whatever its size, and the likely draft vocabulary."""

MEASURED_SHARES = (
    ("training step of an 8B target's EAGLE-3, all roots / a third", "train", "H200", "42.5 / 40.0 %"),
    ("the same", "train", "H100", "40.1 / 37.2 %"),
    ("passes of capture, four layers of an 8B target, bfloat16, 297,000 tokens/s", "prefill", "H100", None))
"""Work, the plan's rate, GPU, and the share of the data sheet's TFLOP/s that was measured (docs/results/gpu.md)."""


def _measured() -> str:
    """Seconds that plans of the default rates give, next to what jobs of this repository took; and shares of GPUs."""
    job = demo_job(short=False, engine="embedded", target=QUICKSTART)
    directory = target_dir(job.target)
    assert directory is not None  # it ships
    planned = {stage.stage: round(3600 * stage.hours) for stage in make_plan(
        derive(job), target_facts(directory), None, data_facts=data_facts(job.data), rates=rates(Settings())).stages}
    lines = ["## Predicted against measured\n",
             "Whole jobs on two cores of an AMD EPYC, seconds, planned with the default rates of a CPU, which\n"
             "`eyrie calibrate` replaces by those of the machine.\n",
             "| stage | [demo](demo.md): planned | took | [published](published.md#the-whole-form): planned | took |",
             "|---|---|---|---|---|",
             *(f"| {stage} | {planned[stage]:,} | {took:,} | {PUBLISHED[stage][0]:,} | {PUBLISHED[stage][1]:,} |"
               for stage, took in DEMO_TOOK.items()),
             "", "Training of the published job is planned as it is now; when it ran, the plan had 1,562 s.\n",
             "On GPUs no whole job was measured. What the plan assumes of the data sheet's rates, and what was\n"
             "reached ([on a GPU](gpu.md)):\n",
             "| work | GPU | assumed, expected | range | reached |", "|---|---|---|---|---|"]
    four = replace(LLAMA_8B, num_layers=4)
    layers = four.parameters - four.embedding_parameters
    for work, rate, name, reached in MEASURED_SHARES:
        gpu = next(gpu for gpu in GPUS if gpu.name == name)
        low, expected, high = (getattr(gpu_rates(gpu, speed, num_gpus=1, tp_size=1, batch=1, weight_bytes=2.0,
                                                 active_share=1.0), rate) / (gpu.tflops * 1e3)
                               for speed in ("low", "expected", "high"))
        share = reached or f"{2 * layers * 297_000 / (gpu.tflops * 1e12):.0%} without attention"
        lines.append(f"| {work} | {name} | {expected:.0%} | {low:.0%} to {high:.0%} | {share} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    parts = ["# Plans of large jobs\n",
             "Computed by `python -m benchmarks.plans` from published peaks of the GPUs and assumed shares\n"
             "of them ([hardware.py](../../api/eyrie_api/planning/hardware.py)); only the last section\n"
             "was measured. Of these GPUs Eyrie has run on one H200 and one H100, without SGLang. "
             "A test keeps the\n"
             "page current. Hours are expected ones with their range, stages one after the other, with the starts of\n"
             "servers (assumed: 30 to 120 s and the weights at 0.5 to 5 GB/s). Each doubling of a server's GPUs\n"
             "leaves 80 to 95 % of their rate (assumed). Reading the KV cache is not\n"
             "counted, which makes decoding of long answers look faster than it is, by up to two times;\n"
             "prices of GPUs are round numbers to show the column. Money of the object store is\n"
             "that of the list prices of S3 in us-east-1\n"
             "([store_prices.py](../../api/eyrie_api/artifacts/store_prices.py)),\n"
             "with states read by ranges: requests, and storage while the job runs. `eyrie calibrate JOB` compares\n"
             "the plan of any job with what it took, and names the settings that correct the rates of a machine.\n"]
    for job in JOBS:
        plan = job.plan()
        parts += [f"## {job.title}\n", f"[examples/{job.example}](../examples/{job.example})\n", _table(plan)]
        if job.store is not None:
            parts.append(_final_states(job, plan))
    return "\n".join([*parts, _six(), _measured()])


def _final_states(job: Job, plan: Plan) -> str:
    """What storing the final state of answer tokens alone saves, by the numbers of the plan."""
    rows, prompt, answer = (int(one or 0) for one in (job.data.rows, job.data.prompt_tokens, job.data.answer_tokens))
    everywhere = 4 * 2 * job.target.hidden_size * (prompt + answer)
    [capture] = [one for one in plan.stages if one.stage == "capture"]
    tokens, total = prompt + answer, rows * everywhere
    held_out = 1 - capture.tokens / (rows * tokens)
    return (
        f"**Why not 42 TiB.** Four bfloat16 states of {job.target.hidden_size} values on every token, three of them\n"
        f"aux, are {everywhere / 2**20:g} MiB per sample of {tokens} tokens, and {total / 2**40:.1f} TiB "
        f"({total / 1e12:.1f} TB) for {rows:,}\n"
        "samples. The post's 42 \"TiB\" is that with 5 % for serialization, divided by 1000 in one place\n"
        "([plan_work.py](../../api/eyrie_api/planning/plan_work.py) has the arithmetic).\n"
        f"Eyrie stores {size(capture.bytes_on_disk)}: the final state is the target of the training's loss,\n"
        f"which answer tokens alone have, and {answer / tokens:.0%} of these tokens are answers:\n"
        f"{plan.bytes_per_token:,} bytes per token in place of {everywhere // tokens:,}. Of the samples {held_out:.0%} "
        "are held out\nand not captured.\n")


def _table(plan: Plan) -> str:
    rows = ["| stage | tokens | disk | hours | range | GPUs | GPU hours | cost | bound by |",
            "|---|---|---|---|---|---|---|---|---|"]
    stored = ["", "| object store | objects | writes | reads | bytes read | cost | range |",
              "|---|---|---|---|---|---|---|"]
    for one in plan.stages:
        seen = one.hours_range
        hours_range = "-" if seen is None else f"{seen.low:.2f} to {seen.high:.2f}"
        rows.append(f"| {one.stage} | {one.tokens / 1e6:,.1f} M | {size(one.bytes_on_disk)} | {one.hours:.2f} | "
                    f"{hours_range} | {one.num_gpus} {one.gpu_type} | {one.gpu_hours:,.1f} | "
                    f"{'-' if one.cost is None else format(one.cost, ',.0f')} | {one.bound_by} |")
        if (use := one.store) is not None and use.cost is not None and use.cost_range is not None:
            stored.append(f"| {one.stage} | {use.objects:,} | {use.put_requests:,} | {use.get_requests:,} | "
                          f"{size(use.read_bytes)} | {use.cost:,.2f} | {use.cost_range.low:,.2f} to "
                          f"{use.cost_range.high:,.2f} |")
    cost = "-" if plan.total_cost is None else f"{plan.total_cost:,.0f}"
    rows.append(f"| total | {plan.total_tokens / 1e6:,.1f} M | {size(plan.total_bytes_on_disk)} | "
                f"{plan.total_hours:.2f} | | | {plan.total_gpu_hours:,.1f} | {cost} | |")
    if plan.total_store_cost is not None and plan.total_store_cost_range is not None:
        whole = plan.total_store_cost_range
        rows += [*stored, f"| total | | | | | {plan.total_store_cost:,.2f} | {whole.low:,.2f} to {whole.high:,.2f} |",
                 "", f"After the job its files cost {plan.store_month_cost:,.0f} a month until `eyrie storage --clean` "
                 "removes the states."]
    words = [f"\n{plan.bottleneck}. {plan.bytes_per_token:,} bytes of states per token.\n"]
    words += [f"- {one.stage}: {one.hint}" for one in plan.stages if one.hint]
    words += [] if plan.serving is None else [f"- serving: {plan.serving.words}"]
    words += [f"- {warning}" for warning in plan.warnings]
    return "\n".join(rows + words) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

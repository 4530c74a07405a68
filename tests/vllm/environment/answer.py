"""Greedy answers of vLLM's offline engine, with its counts of accepted draft tokens. Runs in vLLM's interpreter.

    python answer.py REQUEST.json ANSWERS.json

REQUEST    {"model": DIR, "speculative_config": {...} or null, "prompts": [[ids]], "max_tokens": N}
ANSWERS    {"alone": [ANSWER of each prompt], "together": ANSWER of all prompts, submitted at once}
ANSWER     {"token_ids": [[ids]], "drafts": rounds, "accepted_per_position": [[k]: rounds that accepted k + 1 or more]}

The counts are differences of vLLM's own metrics (`vllm:spec_decode_*`), which are sums over requests: those of one
request are known only when it runs alone.
"""

import json
import os
import sys
from pathlib import Path

# One process, which a signal to it ends; set before vLLM is imported.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
               "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams

PREFIX = "vllm:spec_decode_num_"


def main(request_file: str, answers_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    # float32 and eager: two implementations agree to the token, and nothing is compiled. The pool of 256 MiB is what
    # these prompts need; by default vLLM takes a share of the machine's memory.
    llm = LLM(model=request["model"], speculative_config=request["speculative_config"], dtype="float32",
              enforce_eager=True, max_model_len=1024, max_num_seqs=8, kv_cache_memory_bytes=1 << 28,
              enable_prefix_caching=False, disable_log_stats=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])

    def answer(prompts: list[list[int]]) -> dict[str, object]:
        drafts, accepted = counts(llm)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        later_drafts, later_accepted = counts(llm)
        return {"token_ids": [list(one.outputs[0].token_ids) for one in found], "drafts": later_drafts - drafts,
                "accepted_per_position": [now - before for now, before in zip(later_accepted, accepted, strict=True)]}

    prompts = request["prompts"]
    answers = {"alone": [answer([prompt]) for prompt in prompts], "together": answer(prompts)}
    Path(answers_file).write_text(json.dumps(answers))


def counts(llm: LLM) -> tuple[int, list[int]]:
    """Rounds so far, and for each position of the draft the rounds that accepted it."""
    found = [metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)]
    metrics = {metric.name.removeprefix(PREFIX): metric for metric in found}
    if not metrics:
        return 0, []
    return metrics["drafts"].value, list(metrics["accepted_tokens_per_pos"].values)


if __name__ == "__main__":
    main(*sys.argv[1:])

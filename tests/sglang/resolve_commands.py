"""Resolve launch lines through SGLang's own parser and rules, for machines that are not here. Run by SGLang's Python.

JSON in on standard input: `{"machines": {name: {"facts": {...}, "memory_mib": n}}, "cases": [{"name", "machine",
"arguments", "environment", "drafter"}]}`. JSON out on standard output: per case `{"name", "refused": null or text,
"resolved": {...}}`.

A machine is emulated by SGLang's own hook for saying what kind of machine this is (`override_platform`) and by its
memory. Resolution then runs as the server would run it before it loads anything: parse, `resolve_once`,
`check_server_args`, and the drafter's model configuration. What kernels and model runners find out later is not
reached; `eyrie_api.planning.sglang_attention` holds those rules from reading them.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from typing import Any

import sglang.srt.utils.common as sglang_common
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs, prepare_server_args

REPORTED = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "page_size", "mem_fraction_static",
    "max_running_requests", "context_length", "speculative_algorithm", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_adaptive",
    "speculative_draft_model_quantization", "speculative_draft_window_size", "random_seed", "enable_lora", "api_key",
    "attn_dp_size", "speculative_draft_attention_backend", "speculative_use_rejection_sampling",
    "speculative_use_block_verification", "speculative_draft_kv_cache_dtype", "speculative_dspark_sps_table_path",
)


def main() -> None:
    """Answer all cases."""
    given = json.load(sys.stdin)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    logging.disable(logging.ERROR)
    answers = []
    for case in given["cases"]:
        unknown = [word for word in case["arguments"] if word.startswith("--") and word not in known]
        machine = given["machines"][case["machine"]]
        noise = io.StringIO()
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            try:
                resolved, refused = resolve(case, machine), None
            except SystemExit:
                resolved, refused = None, noise.getvalue()
            except Exception as error:  # noqa: BLE001 - a refusal of any kind is the answer asked for
                resolved, refused = None, f"{type(error).__name__}: {error}"
        answers.append({"name": case["name"], "unknown": unknown, "refused": refused, "resolved": resolved})
    json.dump(answers, sys.stdout)


def resolve(case: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """The settings a server would run with. Raises whatever SGLang raises."""
    arguments = list(case["arguments"])
    if "--device" not in arguments:
        arguments += ["--device", machine["device"]]  # detected on the machine itself
    before = dict(os.environ)
    os.environ.update(case["environment"])
    sglang_common.get_device_memory_capacity = memory_hook.get_device_memory_capacity = \
        lambda device=None: machine["memory_mib"]
    try:
        with override_platform(**machine["facts"]):
            args = prepare_server_args(arguments)
            args.resolve_once()
            args.check_server_args()
            view = resolved_view(args)
            found = {name: getattr(view, name) for name in REPORTED}
            if view.speculative_draft_model_path is not None:
                ModelConfig.from_server_args(args, model_path=view.speculative_draft_model_path, is_draft_model=True)
            config = model_config_of(args)
            found["architecture"] = config.hf_config.architectures[0]
            found["mla"] = config.attention_arch.name == "MLA"
            found["everything"] = {
                field: repr(getattr(view, field)) for field in sorted(type(args).__struct_fields__)
                if not field.startswith(("speculative_", "_"))}
            return found
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()

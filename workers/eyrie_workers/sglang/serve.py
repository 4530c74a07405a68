"""SGLang behind an endpoint: build its command line on this machine, write the ready file, become SGLang.

    python -m eyrie_workers.sglang.serve --target DIR --model NAME --use '{"setting": ...}' --ready-file R

The control plane knows which drafter and setting an endpoint uses (`DrafterUse`), not which flags this machine needs
for them: that depends on its GPU and on the configs of target and drafter. The process is replaced by SGLang's
launcher (exec), so that pid, session and log are the server's own.

The ready file is written before the launcher starts, because SGLang cannot select a port itself. It contains the URL
and does not mean that the server is ready; `GET /health` reports that.

The server takes its share of the memory that is free when it starts. Whether a second one fits next to it is decided
before it starts, by the control plane.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from eyrie_api.artifacts import write_atomically
from eyrie_api.contract.engine import EngineSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.errors import EyrieError, report_error
from eyrie_api.processes import free_port
from eyrie_workers.sglang import profiles
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, adaptive_config, launch_arguments, launch_environment
from eyrie_workers.sglang.local_hardware import detect_hardware
from eyrie_workers.sglang.process import launcher_command, merged_environment, plugin_root
from eyrie_workers.targets.config import read_json


def build_launch_plan(options: argparse.Namespace, use: DrafterUse, port: int, directory: Path) -> LaunchPlan:
    """The launch plan of one engine on this machine. Raises Unlaunchable or InvalidInput."""
    engine = EngineSpec.model_validate_json(options.engine)
    machine = replace(detect_hardware(), given_fraction=engine.sglang_arguments.mem_fraction_static)
    drafter = None
    if use.setting.method == "drafter" and use.drafter_dir is not None:
        drafter = read_drafter(use.drafter_dir, read_json(Path(use.drafter_dir) / "config.json"))
    config = read_json(Path(options.target) / "config.json")
    target = read_target(options.target, config)
    max_requests = options.max_concurrency
    if not max_requests:  # as many as this machine's memory holds next to the weights
        weights = sum(profiles.weights_on_disk(Path(model))
                      for model in (options.target, use.drafter_dir) if model is not None)
        memory = profiles.available_bytes(machine, engine.tp_size)
        if machine.platform == "cpu":  # the share that SGLang takes of main memory
            memory = int(machine.mem_fraction * memory)
        max_requests = profiles.requests_that_fit(
            max(0, memory - weights), profiles.kv_bytes_per_token(config, options.dtype),
            use.context_length or target.context_length)
    return LaunchPlan(
        target=target, machine=machine, served_model_name=options.model, drafter=drafter, setting=use.setting,
        map=use.map, adaptive_path=str(directory / "adaptive.json"), host=options.host, port=port, dtype=options.dtype,
        context_length=use.context_length, engine=engine, max_running_requests=max_requests)


def main() -> NoReturn:
    """`python -m eyrie_workers.sglang.serve`: becomes SGLang, or exits with the error's code."""
    parser = argparse.ArgumentParser(description="Become a SGLang server with the given drafter and setting.")
    parser.add_argument("--target", required=True, help="the target's directory")
    parser.add_argument("--model", required=True, help="the model name in requests")
    parser.add_argument("--use", required=True, help="a DrafterUse in JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-concurrency", type=int, help="default: what the memory holds")
    parser.add_argument("--engine", default='"sglang"', help="an EngineSpec in JSON")
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    port = free_port(options.host)
    try:
        plan = build_launch_plan(options, DrafterUse.model_validate_json(options.use), port, options.ready_file.parent)
        plan = replace(plan, plugin_root=plugin_root(options.ready_file.parent))
        command = (*launcher_command(), *launch_arguments(plan))
    except EyrieError as error:
        sys.exit(report_error(error))
    config = adaptive_config(plan)
    if config is not None and plan.adaptive_path is not None:
        write_atomically(Path(plan.adaptive_path), config)
    write_atomically(options.ready_file, json.dumps({"url": f"http://{options.host}:{port}"}) + "\n")
    os.execvpe(command[0], command, merged_environment(launch_environment(plan)))


if __name__ == "__main__":
    main()

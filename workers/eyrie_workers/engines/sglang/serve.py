"""SGLang behind an endpoint: work out its launch line here, say where it will listen, and become it.

    python -m eyrie_workers.engines.sglang.serve --target DIR --model NAME --use '{"setting": ...}' --ready-file R

Whoever tends an endpoint knows what to decode with (`DrafterUse`), not which flags this machine needs for it: that
takes a look at its GPU and at the configs of target and drafter, which is a worker's business. The process is replaced
by SGLang's launcher (exec), so its pid, its session and its log are the engine's own.

The ready file is written before the launcher starts: SGLang cannot choose a port itself. It says where to ask, not that
anybody answers; `GET /health` does.

Two engines stand side by side while a new revision is tried, so each takes half of the memory that is free when it
starts. On one GPU the second has less for its KV cache than it could have alone.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from eyrie_api.artifacts import write_atomically
from eyrie_api.errors import EyrieError
from eyrie_api.processes import free_port
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.engines.managed_servers import config_of, machine_profile
from eyrie_workers.engines.sglang import launch
from eyrie_workers.engines.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.engines.sglang.process import merged_environment, plugin_root, program

_SHARE = 0.5
"""Of the memory fraction the profile would give one server alone."""


def build_launch_plan(options: argparse.Namespace, use: DrafterUse, port: int, directory: Path) -> launch.LaunchPlan:
    """The launch plan of one engine on this machine. Raises Unlaunchable or InvalidInput."""
    machine = machine_profile()
    drafts = use.setting.method == "drafter" and use.drafter_dir is not None
    return launch.LaunchPlan(
        target=read_target(options.target, config_of(Path(options.target))), machine=machine,
        served_model_name=options.model,
        drafter=read_drafter(use.drafter_dir, config_of(Path(use.drafter_dir))) if drafts and use.drafter_dir else None,
        setting=use.setting, map=use.map, adaptive_path=str(directory / "adaptive.json"), host=options.host, port=port,
        dtype=options.dtype, context_length=use.context_length, max_running_requests=options.max_concurrency,
        mem_fraction=machine.mem_fraction if machine.platform == "cpu" else round(machine.mem_fraction * _SHARE, 3))


def main() -> NoReturn:
    """`python -m eyrie_workers.engines.sglang.serve`: becomes SGLang, or exits with the error's code."""
    parser = argparse.ArgumentParser(description="Become a SGLang server that decodes as told.")
    parser.add_argument("--target", required=True, help="the target's directory")
    parser.add_argument("--model", required=True, help="the name clients ask for")
    parser.add_argument("--use", required=True, help="a DrafterUse in JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    port = free_port(options.host)
    try:
        plan = build_launch_plan(options, DrafterUse.model_validate_json(options.use), port, options.ready_file.parent)
        plan = replace(plan, plugin_root=plugin_root(options.ready_file.parent))
        line = (*program(), *launch.launch_arguments(plan))
    except EyrieError as error:
        sys.exit(report_error(error))
    document = launch.adaptive_document(plan)
    if document is not None and plan.adaptive_path is not None:
        write_atomically(Path(plan.adaptive_path), document)
    write_atomically(options.ready_file, json.dumps({"url": f"http://{options.host}:{port}"}) + "\n")
    os.execvpe(line[0], line, merged_environment(launch.launch_environment(plan)))


if __name__ == "__main__":
    main()

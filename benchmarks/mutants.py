"""Seeded mutants of decisions, speculation and training, and how many of them the tests kill.

    python -m benchmarks.mutants --out .eyrie/bench/mutants.json [--mutants 100] [--seed 0]

cosmic-ray (https://cosmic-ray.readthedocs.io; `pip install cosmic-ray`) enumerates every mutation of the modules; a
seeded sample of equal size is drawn from each group and run against the tests of that group alone. A mutant that no
test notices survives: either a test is missing, or the mutation does not change behaviour (an equivalent comparison,
the text of a message). Sources are mutated in a copy of the checkout. Decorators and `|`, which stands in annotations
here, are not mutated.
"""

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("api", "kernels", "operator", "pipelines", "workers")


@dataclass(frozen=True)
class Group:
    """Modules under mutation and the tests that have to notice."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = (
    Group("decisions",
          tuple(f"api/eyrie_api/{name}.py" for name in (
              "decisions/leaderboard", "decisions/promotion", "planning/plan", "planning/sweep")),
          tuple(f"tests/api/test_{name}.py" for name in ("leaderboard", "plan", "promotion", "sweep"))),
    Group("speculation", ("workers/eyrie_workers/speculation",), ("tests/workers/speculation",)),
    Group("training", ("workers/eyrie_workers/training",), ("tests/workers/training",)),
)

_SKIPPED = ("core/RemoveDecorator", "core/ReplaceBinaryOperator_BitOr")
_CONFIG = """[cosmic-ray]
module-path = {modules}
timeout = {timeout_s}
excluded-modules = []
test-command = {command}

[cosmic-ray.distributor]
name = "local"
"""


def run_group(group: Group, copy: Path, num: int, seed: int, timeout_s: float) -> dict[str, object]:
    """Run a sample of the group's mutants in `copy`. Raises CalledProcessError when the unmutated tests fail."""
    python = [sys.executable, "-m"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / name) for name in PACKAGES),
                   "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    tests = [*python, "pytest", "-q", "-x", "-p", "no:cacheprovider", *group.tests]
    subprocess.run(tests, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
    config, session = copy / f"{group.name}.toml", copy / f"{group.name}.sqlite"
    config.write_text(_CONFIG.format(modules=json.dumps(list(group.modules)), timeout_s=timeout_s,
                                     command=json.dumps(" ".join(tests))))
    subprocess.run([*python, "cosmic_ray.cli", "init", str(config), str(session)], cwd=copy, env=environment,
                   check=True)
    possible = _draw(session, num, random.Random(f"{seed}:{group.name}"))
    subprocess.run([*python, "cosmic_ray.cli", "exec", str(config), str(session)], cwd=copy, env=environment,
                   check=True)
    with sqlite3.connect(session) as rows:
        outcomes = rows.execute(
            "select m.module_path, m.operator_name, m.start_pos_row, r.test_outcome from mutation_specs m "
            "join work_results r on r.job_id = m.job_id order by 1, 3").fetchall()
    survived = [f"{module}:{line} {operator}" for module, operator, line, outcome in outcomes if outcome == "SURVIVED"]
    return {"possible": possible, "run": len(outcomes), "killed": len(outcomes) - len(survived), "survived": survived}


def _draw(session: Path, num: int, generator: random.Random) -> int:
    """Keep one mutant at each of `num` random places; returns how many places there were to draw from."""
    places: dict[tuple[str, int, int], list[str]] = {}
    with sqlite3.connect(session) as rows:
        for job, operator, *place in rows.execute(
                "select job_id, operator_name, module_path, start_pos_row, start_pos_col from mutation_specs "
                "order by module_path, start_pos_row, start_pos_col, operator_name, occurrence"):
            if not operator.startswith(_SKIPPED):
                places.setdefault((place[0], place[1], place[2]), []).append(job)
        # A binary operator has eleven replacements, a comparison eight, a number one: drawing places first keeps
        # arithmetic from crowding out the rest.
        kept = {generator.choice(places[place]) for place in generator.sample(sorted(places), min(num, len(places)))}
        for table in ("mutation_specs", "work_items"):
            every = [job for (job,) in rows.execute(f"select job_id from {table}")]
            rows.executemany(f"delete from {table} where job_id = ?", [(job,) for job in every if job not in kept])
    return len(places)


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants",
                                     description="Share of seeded mutants that the tests kill.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=100, help="in all, divided over the groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="per mutant; a mutant that hangs is killed")
    options = parser.parse_args()
    report: dict[str, object] = {"seed": options.seed}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "eyrie"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".eyrie", ".mypy_cache"))
        for index, group in enumerate(GROUPS):
            num = (options.mutants + index) // len(GROUPS)
            report[group.name] = run_group(group, copy, num, options.seed, options.timeout_s)
            print(f"{group.name}: {json.dumps(report[group.name], indent=1)}", flush=True)
            report["seconds"] = round(time.monotonic() - started)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

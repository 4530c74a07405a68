"""The control plane loads no tensor library, and client and command not even a server or a database."""

import subprocess
import sys

# kfp.local changes its process (log handlers, `print`, configuration): only a run's own leader may load it.
HEAVY = ("torch", "transformers", "numpy", "kfp", "matplotlib", "pyarrow")


# In one process, each line's modules after those of the lines before it.
LIGHT = (
    ("eyrie_api.planning.sweep, eyrie_api.decisions.leaderboard, eyrie_api.decisions.promotion, "
     "eyrie_api.planning.plan", (*HEAVY, "sqlalchemy", "httpx")),
    ("eyrie_operator.command", (*HEAVY, "fastapi", "sqlalchemy", "celery", "alembic")),
    ("eyrie_operator.control_plane, eyrie_pipelines.local, eyrie_api.http.server, eyrie_api.chores.tasks, "
     "eyrie_api.client, eyrie_api.planning.plan, eyrie_api.database.ingest", HEAVY),
)


def test_importing_stays_light() -> None:
    code = "import sys\n" + "".join(f"import {modules}\nprint({modules!r}, *sorted(set(sys.modules) & {set(absent)}))\n"
                                    for modules, absent in LIGHT)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.splitlines() == [modules for modules, _ in LIGHT]

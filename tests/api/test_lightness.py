"""The control plane loads no tensor library, and its client not even a server or a database."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "kfp", "matplotlib", "pyarrow")


@pytest.mark.parametrize(("modules", "absent"), [
    ("eyrie_api.server, eyrie_api.tasks, eyrie_api.client, eyrie_api.plan, eyrie_api.ingest", HEAVY),
    ("eyrie_api.client", (*HEAVY, "fastapi", "sqlalchemy", "celery", "alembic")),
    ("eyrie_api.sweep, eyrie_api.leaderboard, eyrie_api.promotion, eyrie_api.plan", (*HEAVY, "sqlalchemy", "httpx")),
])
def test_importing_stays_light(modules: str, absent: tuple[str, ...]) -> None:
    code = f"import sys\nimport {modules}\nprint(*sorted(set(sys.modules) & set({absent!r})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == []

"""MLflow's own tracking server, with a SQLite database: its Flask application, for which mlflow-skinny suffices.

`mlflow server` starts more (jobs of its GenAI part), for which pandas would have to be installed.
"""

import importlib.util
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.servers.processes import Server, Unavailable, shared


def mlflow_server(directory: Path) -> Server:
    """A server that keeps its runs in `directory`, not started yet."""
    # The variables by which `mlflow server` configures its application.
    command = [sys.executable, "-m", "flask", "--app", "mlflow.server:app", "run"]
    return Server(lambda port: [*command, "--port", str(port)], directory / "mlflow.log", ready=_has_tables, env={
                      "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{directory}/mlflow.db",
                      "_MLFLOW_SERVER_ARTIFACT_ROOT": str(directory / "artifacts"),
                      "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def shared_mlflow() -> str:
    """The address of the session's MLflow. Raises Unavailable."""
    return str(shared("mlflow", _start)["address"])


def _start(directory: Path) -> dict[str, Any]:
    if importlib.util.find_spec("mlflow") is None:
        raise Unavailable("no MLflow on this machine: pip install mlflow-skinny")
    server = mlflow_server(directory)
    server.start()
    return {"address": f"http://127.0.0.1:{server.port}"}


def _has_tables(port: int) -> bool:
    # The first request creates the database: ten seconds, in which no other is answered.
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get?experiment_id=0",
                                    timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

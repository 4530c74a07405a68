"""Sends training curves to experiment trackers: MLflow, Weights & Biases, TensorBoard.

None is enabled by default, and none of their packages is installed with Eyrie; a tracker's package is imported when a
spec names it. The job's own record of metrics is complete without them. Each tracker reads its server and credentials
from its own environment variables (MLFLOW_TRACKING_URI, WANDB_API_KEY, ...), never from a spec.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from eyrie_api.errors import InvalidInput


class Tracker(Protocol):
    """One destination of curves."""

    def metric(self, name: str, step: int, value: float) -> None:
        """One point of a series."""

    def close(self) -> None:
        """Flush and end the run."""


class _Mlflow:
    def __init__(self, mlflow: Any, run: str, settings: Mapping[str, Any], directory: Path) -> None:
        self._mlflow = mlflow
        mlflow.start_run(run_name=run)
        mlflow.log_params(dict(settings))

    def metric(self, name: str, step: int, value: float) -> None:
        self._mlflow.log_metric(name, value, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Wandb:
    def __init__(self, wandb: Any, run: str, settings: Mapping[str, Any], directory: Path) -> None:
        self._run = wandb.init(name=run, config=dict(settings), dir=str(directory))

    def metric(self, name: str, step: int, value: float) -> None:
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


class _Tensorboard:
    def __init__(self, tensorboard: Any, run: str, settings: Mapping[str, Any], directory: Path) -> None:
        self._writer = tensorboard.SummaryWriter(str(directory))
        self._writer.add_text("settings", str(dict(settings)))

    def metric(self, name: str, step: int, value: float) -> None:
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


_TRACKERS: dict[str, tuple[str, str, Callable[[Any, str, Mapping[str, Any], Path], Tracker]]] = {
    "mlflow": ("mlflow", "mlflow", _Mlflow),
    "wandb": ("wandb", "wandb", _Wandb),
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", _Tensorboard),
}
"""Name in a spec -> module, package, constructor."""


def open_trackers(names: Sequence[str], run: str, settings: Mapping[str, Any], directory: Path) -> list[Tracker]:
    """The trackers a spec names. Raises InvalidInput, naming the package, for one that is not installed.

    run        name of this training there.
    settings   shown on the tracker's page.
    directory  for trackers that write files.
    """
    opened = []
    for name in names:
        module, package, make = _TRACKERS[name]
        try:
            found = import_module(module)
        except ImportError:
            raise InvalidInput(f"train.trackers names {name}, whose package is not installed here",
                               f"install {package} in the workers' image, or leave {name} out") from None
        opened.append(make(found, run, settings, directory / name))
    return opened

"""Pipelines for the double's tests, compiled by kfp when asked for. The image is the test cluster's empty one."""

# mypy: disable-error-code="untyped-decorator"

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, dsl, kubernetes

from tests.kubeflow.interpreter import Pipeline

IMAGE = "localhost/host:v1"


def compiled(pipeline: Any, image: str = IMAGE) -> dict[str, Any]:
    """As a run carries it."""
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(scratch) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        executor["container"]["image"] = image
    return {"pipeline_spec": documents[0], "platform_spec": documents[1] if len(documents) > 1 else {}}


def read(pipeline: Any) -> Pipeline:
    """As the double reads it."""
    return Pipeline.of(compiled(pipeline))


def box(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dsl.component(base_image=IMAGE, install_kfp_package=False)(function)


@box
def count(num: int) -> list:  # type: ignore[type-arg]
    return list(range(num))


@box
def double(number: int, name: str, more: dict = {}) -> int:  # type: ignore[type-arg]  # noqa: B006
    return number * 2


@box
def total(numbers: list) -> int:  # type: ignore[type-arg]
    return int(sum(numbers))


@box
def plus(left: int, right: int) -> int:
    return left + right


@box
def step(after: str = "") -> str:
    return "done"


@dsl.container_component
def nap(seconds: int, said: dsl.OutputPath(str)) -> dsl.ContainerSpec:  # type: ignore[valid-type]
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-c", 'sleep "$0" && printf rested > "$1"'],
                             args=[seconds, said])


@dsl.container_component
def say(num_bytes: int, said: dsl.OutputPath(str)) -> dsl.ContainerSpec:  # type: ignore[valid-type]
    """So many random letters."""
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-c", 'head -c "$0" /dev/urandom | base64 -w0 > "$1"'],
                             args=[num_bytes, said])


@dsl.container_component
def fail(words: str) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-c", 'echo "$0" >&2; exit 3'], args=[words])


@dsl.container_component
def greet(name: str, greeting: dsl.OutputPath(str)) -> dsl.ContainerSpec:  # type: ignore[valid-type]
    return dsl.ContainerSpec(image=IMAGE, command=["sh", "-c", 'printf %s "$0" > "$1"'],
                             args=[f"hello {name}", greeting])


@box
def gather(rows: dsl.Output[dsl.Dataset]) -> str:
    return "gathered"


@box
def fit(number: int, rows: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]) -> int:
    return number


@box
def judge(fitted: list, models: dsl.Input[list[dsl.Model]], figures: dsl.Output[dsl.Metrics]) -> int:  # type: ignore[type-arg]
    return len(fitted)


@dsl.pipeline(name="doubled")
def doubled(num: int = 3, name: str = "me") -> int:
    """Three steps: a list, each of it doubled, the sum."""
    numbers = count(num=num)
    with dsl.ParallelFor(numbers.output) as number:
        one = double(number=number, name=f"dear {name}")
    return total(numbers=dsl.Collected(one.output)).output  # type: ignore[no-any-return]


@dsl.pipeline(name="two-at-a-time")
def two_at_a_time() -> None:
    with dsl.ParallelFor([{"a": 1, "b": 7}, {"a": 2, "b": 8}, {"a": 3, "b": 9}], parallelism=2) as item:
        plus(left=item.a, right=item.b)


@dsl.pipeline(name="loops-in-loops")
def loops_in_loops() -> int:
    rows = count(num=2)
    columns = count(num=3)
    with dsl.ParallelFor(rows.output), dsl.ParallelFor(columns.output) as column:
        one = double(number=column, name="n")
    return total(numbers=dsl.Collected(one.output)).output  # type: ignore[no-any-return]


@dsl.pipeline(name="pipelines-in-loops")
def pipelines_in_loops() -> int:
    with dsl.ParallelFor([1, 2]) as number:
        one = doubled(num=number)
    return total(numbers=dsl.Collected(one.output)).output  # type: ignore[no-any-return]


@cache
def greeted() -> Any:
    """What kfp and kfp-kubernetes can say of a container. Made when asked for: kfp reads the stack of all callers at
    each setting, a second in all."""

    @dsl.pipeline(name="greeted")
    def greeted(who: str, secret: str) -> None:
        task = greet(name=f"dear {who}")
        task.set_env_variable("MOOD", "good").set_cpu_request("500m").set_memory_limit("1Gi").set_retry(
            2, backoff_duration="3s")
        task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(2)
        kubernetes.use_secret_as_env(task, secret, {"token": "HF_TOKEN"})
        kubernetes.use_secret_as_volume(task, "keys", "/keys", optional=True)
        kubernetes.use_config_map_as_env(task, "settings", {"level": "LEVEL"})
        kubernetes.mount_pvc(task, "work", "/var/lib/eyrie", sub_path="a")
        kubernetes.add_node_selector(task, "pool", "gpu")
        kubernetes.add_toleration(task, key="gpu", operator="Exists", effect="NoSchedule", toleration_seconds=5)
        kubernetes.add_pod_label(task, "queue", "q")
        kubernetes.add_pod_annotation(task, "note", "n")
        kubernetes.empty_dir_mount(task, "scratch", "/scratch", medium="Memory", size_limit="1Gi")
        kubernetes.use_field_path_as_env(task, "NODE", "spec.nodeName")
        kubernetes.set_timeout(task, 30)
        kubernetes.set_image_pull_policy(task, "Never")
        kubernetes.set_image_pull_secrets(task, ["registry"])
        kubernetes.set_security_context(task, run_as_user=7)

    return greeted


@dsl.pipeline(name="rested")
def rested(seconds: int) -> str:
    """A nap between two steps. It may be disturbed twice."""
    task = nap(seconds=seconds).after(step())
    task.set_retry(2, backoff_duration="0s")
    return step(after=task.output).output  # type: ignore[no-any-return]


@dsl.pipeline(name="doomed")
def doomed() -> None:
    """One fails, one says too much, one is well, and one would have come after the first."""
    failed = fail(words="out of luck")
    say(num_bytes=20_000)
    nap(seconds=1)
    step().after(failed)


@dsl.pipeline(name="two-branches")
def two_branches() -> None:
    """One branch of two steps, one of three."""
    short = step()
    step(after=short.output)
    first = step()
    second = step(after=first.output)
    step(after=second.output)


@dsl.pipeline(name="fitted")
def fitted() -> int:
    """Artifacts into a loop, out of it as a list, and on."""
    gathered = gather()
    with dsl.ParallelFor([1, 2]) as number:
        one = fit(number=number, rows=gathered.outputs["rows"])
    return judge(fitted=dsl.Collected(one.outputs["Output"]),  # type: ignore[no-any-return]
                 models=dsl.Collected(one.outputs["model"])).outputs["Output"]

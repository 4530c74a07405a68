"""The double's understanding of a compiled pipeline: which task may run now, and with which inputs. Pure.

A compiled pipeline (kfp's intermediate representation, IR: `PipelineSpec`) is a tree: a DAG's tasks are containers or
DAGs again, and a task with a `parameterIterator` is its component once per item. `walk` reads the tree from the root,
given what the containers have put out so far, and answers with the same tree of `Node`s, each with its state. It keeps
nothing: a backend that was killed asks again and gets the same answer. `startable` then names the containers to start.

What the compiler writes and this reads: constants with placeholders, a DAG's inputs, another task's outputs, the path
into a loop item (`parseJson(string_value)["a"]`), items given raw or by an input, limits of parallelism, outputs of
DAGs and of loops (`dsl.Collected`: one list in the items' order; of loops in loops one flat list, since that is what
the real backend collects). What it does not read is refused when a run is made, so that no run does something else
than it says: conditions, exit handlers, importers, optional artifacts, `dsl.OneOf`, `dsl.Concat`.

Artifacts are the launcher's (`merged_artifacts`): each output has a URI below the run's root before its container
starts, the same for every attempt; afterwards the executor's output file may set another URI and adds metadata. An
artifact is passed on as a list, of one element except where a loop collects.

Numbers cross a box border as the real backend writes them: a whole number is written without its point. Once a task of
a DAG has failed nothing new starts in that DAG or below; what runs there finishes, and then the DAG has failed. So does
Argo with its `failFast`, which the real backend leaves on.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

OUTPUT_FILE = "/tmp/kfp_outputs/output_metadata.json"
"""Where the real launcher has a component write all it puts out."""
OUTPUT_PARAMETERS = "/tmp/kfp/outputs"
"""Where the real launcher has a component write one output parameter: a file named as the parameter."""

_PLACEHOLDER = re.compile(r"\{\{\$(.*?)\}\}")
_INPUT = re.compile(r"\.inputs\.parameters\[(?:'|\"|'')([^'\"\]]+)(?:'|\"|'')\](?:\.value)?$")
_OUTPUT = re.compile(r"\.outputs\.parameters\[(?:'|\"|'')([^'\"\]]+)(?:'|\"|'')\]\.output_file$")
_ARTIFACT = re.compile(r"\.(inputs|outputs)\.artifacts\[(?:'|\"|'')([^'\"\]]+)(?:'|\"|'')\]\.(uri|path)$")
_PATH = re.compile(r'^parseJson\(string_value\)((?:\["[^"]+"\])*)$')


class Refused(ValueError):
    """The pipeline or its arguments cannot be run by this double; says what and where."""


class State(StrEnum):
    """Of a node in the tree."""

    WAITING = "WAITING"
    """Something it needs is not there yet."""
    READY = "READY"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


Artifacts = Mapping[str, list[dict[str, Any]]]
"""By the name of an input or output: runtime artifacts (name, type, uri, metadata), as the launcher has them."""


@dataclass(frozen=True)
class Seen:
    """What is known of one container: begun and not ended, or how it ended."""

    state: State
    outputs: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Artifacts = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """The DAG around a task: what its inputs may name."""

    inputs: Mapping[str, Any]
    produced: Mapping[str, Mapping[str, Any]]
    """Output parameters of the sibling tasks that have ended well, by the task's name."""
    artifacts: Artifacts = field(default_factory=dict)
    produced_artifacts: Mapping[str, Artifacts] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """One task of the pipeline, or one iteration of one."""

    path: str
    """`for-loop-1/2/train`: the names of the tasks from the root, a number for an iteration."""
    name: str
    state: State
    component: str
    task: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    input_artifacts: Artifacts = field(default_factory=dict)
    output_artifacts: Artifacts = field(default_factory=dict)
    scope: Scope = field(default_factory=lambda: Scope({}, {}))
    gathered: frozenset[str] = frozenset()
    """Outputs that a loop has collected, here or below."""
    children: tuple["Node", ...] = ()
    parallelism: int = 0
    """Children at a time; 0: any number."""

    def leaves(self) -> Iterator["Node"]:
        """The containers at and below it."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline and its platform's settings."""

    spec: Mapping[str, Any]
    platform: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Pipeline":
        """From a run's `pipeline_spec`: the IR alone, or an object with the IR and the platform's settings."""
        both = "pipeline_spec" in given or "pipelineSpec" in given
        spec = given.get("pipeline_spec", given.get("pipelineSpec")) if both else given
        platform = given.get("platform_spec", given.get("platformSpec")) if both else None
        if not isinstance(spec, Mapping) or "root" not in spec:
            raise Refused("pipeline_spec has no `root`: give a compiled pipeline")
        return Pipeline(spec, platform or {})

    @property
    def name(self) -> str:
        return str(self.spec.get("pipelineInfo", {}).get("name", "pipeline"))

    def component(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] | None = self.spec.get("components", {}).get(name)
        if found is None:
            raise Refused(f"component {name!r} is not in the pipeline")
        return found

    def container(self, component: str) -> Mapping[str, Any]:
        """The container a component runs."""
        label = self.component(component)["executorLabel"]
        found: Mapping[str, Any] = self.spec["deploymentSpec"]["executors"][label]["container"]
        return found

    def kubernetes(self, component: str) -> Mapping[str, Any]:
        """What kfp-kubernetes asked for a component's pod."""
        label = self.component(component)["executorLabel"]
        platforms = self.platform.get("platforms", {}).get("kubernetes", {})
        found: Mapping[str, Any] = platforms.get("deploymentSpec", {}).get("executors", {}).get(label, {})
        return found


def arguments_of(pipeline: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """The run's arguments with the pipeline's defaults."""
    defined = pipeline.spec["root"].get("inputDefinitions", {}).get("parameters", {})
    unknown = sorted(set(given) - set(defined))
    if unknown:
        raise Refused(f"the pipeline has no input parameters {unknown}; it has {sorted(defined)}")
    inputs = _typed(defined, given)
    missing = sorted(name for name, one in defined.items() if name not in inputs and not one.get("isOptional"))
    if missing:
        raise Refused(f"the pipeline's input parameters {missing} are required and were not given")
    return inputs


def refuse_what_is_not_read(pipeline: Pipeline) -> None:
    """Raise `Refused` for anything in the pipeline that this double would run otherwise than the real backend."""
    for where, dag in _dags(pipeline):
        for name, task in dag.get("tasks", {}).items():
            known = {"taskInfo", "inputs", "dependentTasks", "cachingOptions", "componentRef", "parameterIterator",
                     "iteratorPolicy", "retryPolicy"}
            _refuse_others(f"task {where}/{name}", task, known)
            _refuse_others(f"the inputs of task {where}/{name}", task.get("inputs", {}), {"parameters", "artifacts"})
            _refuse_parts(pipeline, f"task {where}/{name}", task)
        _refuse_others(f"the outputs of DAG {where}", dag.get("outputs", {}), {"parameters", "artifacts"})
        for name, output in dag.get("outputs", {}).get("artifacts", {}).items():
            if len(output["artifactSelectors"]) != 1:
                raise Refused(f"output {name} of DAG {where}: one of several artifacts is not read by this double")
        for name, output in dag.get("outputs", {}).get("parameters", {}).items():
            _refuse_others(f"output {name} of DAG {where}", output, {"valueFromParameter"})


def _refuse_parts(pipeline: Pipeline, where: str, task: Mapping[str, Any]) -> None:
    component = pipeline.component(task["componentRef"]["name"])
    for kind in ("inputDefinitions", "outputDefinitions"):
        _refuse_others(f"{kind} of {where}", component.get(kind, {}), {"parameters", "artifacts"})
        for name, one in component.get(kind, {}).get("artifacts", {}).items():
            _refuse_others(f"artifact {name} of {where}", one, {"artifactType", "isArtifactList", "description"})
    for name, one in task.get("inputs", {}).get("artifacts", {}).items():
        _refuse_others(f"input {name} of {where}", one, {"componentInputArtifact", "taskOutputArtifact"})
    for name, one in task.get("inputs", {}).get("parameters", {}).items():
        _refuse_others(f"input {name} of {where}", one, {"componentInputParameter", "runtimeValue",
                                                          "taskOutputParameter", "parameterExpressionSelector"})
        if not _PATH.match(one.get("parameterExpressionSelector", "parseJson(string_value)")):
            raise Refused(f"input {name} of {where}: {one['parameterExpressionSelector']!r} is not a path")
    if "executorLabel" not in component:
        return
    executor = pipeline.spec["deploymentSpec"]["executors"][component["executorLabel"]]
    _refuse_others(f"the executor of {where}", executor, {"container"})
    for part in (*executor["container"].get("command", ()), *executor["container"].get("args", ())):
        if part.startswith(('{"Concat"', '{"IfPresent"')):
            raise Refused(f"{where}: the placeholder {part[:40]!r} is not read by this double of the backend")


def _refuse_others(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    others = sorted(set(given) - known)
    if others:
        raise Refused(f"{where}: {', '.join(others)} is not read by this double of the backend")


def _dags(pipeline: Pipeline) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "dag" not in pipeline.spec["root"]:
        raise Refused("the pipeline's root is not a DAG")
    yield "root", pipeline.spec["root"]["dag"]
    for name, component in pipeline.spec.get("components", {}).items():
        if "dag" in component:
            yield name, component["dag"]


def walk(pipeline: Pipeline, arguments: Mapping[str, Any], seen: Mapping[str, Seen]) -> Node:
    """The whole tree as it stands, `seen` being what is known of each container by its path."""
    return _Walk(pipeline, seen).dag("", "root", "root", {}, pipeline.spec["root"], arguments, {}, Scope({}, {}))


def startable(node: Node) -> Iterator[Node]:
    """The containers that may start now."""
    if not node.children:
        if node.state is State.READY:
            yield node
        return
    if any(child.state is State.FAILED for child in node.children):
        return
    begun = sum(child.state is State.RUNNING for child in node.children)
    for child in node.children:
        if child.state is State.RUNNING and child.children:
            yield from startable(child)
        elif child.state is State.READY and (not node.parallelism or begun < node.parallelism):
            begun += 1
            yield from startable(child)


@dataclass(frozen=True)
class _Walk:
    pipeline: Pipeline
    seen: Mapping[str, Seen]

    def dag(self, path: str, name: str, reference: str, task: Mapping[str, Any], component: Mapping[str, Any],
            inputs: Mapping[str, Any], artifacts: Artifacts, scope: Scope) -> Node:
        """A DAG whose inputs are known."""
        tasks: Mapping[str, Mapping[str, Any]] = component["dag"].get("tasks", {})
        done: dict[str, Node] = {}
        for one in in_order(tasks):
            ended = {other: node for other, node in done.items() if node.state is State.SUCCEEDED}
            around = Scope(inputs, {other: node.outputs for other, node in ended.items()}, artifacts,
                           {other: node.output_artifacts for other, node in ended.items()})
            done[one] = self.task(f"{path}/{one}".lstrip("/"), one, tasks[one], around)
        children = tuple(done.values())
        state = _state_of(children)
        outputs, gathered, handed_on = {}, set(), {}
        if state is State.SUCCEEDED:
            for key, selectors in component["dag"].get("outputs", {}).get("artifacts", {}).items():
                (selector,) = selectors["artifactSelectors"]
                handed_on[key] = done[selector["producerSubtask"]].output_artifacts[selector["outputArtifactKey"]]
            for key, selector in component["dag"].get("outputs", {}).get("parameters", {}).items():
                source = selector["valueFromParameter"]
                producer, name_there = done[source["producerSubtask"]], source["outputParameterKey"]
                outputs[key] = producer.outputs[name_there]
                gathered |= {key} if name_there in producer.gathered else set()
        return Node(path, name, state, reference, task, inputs, outputs, artifacts, handed_on, scope,
                    frozenset(gathered), children)

    def task(self, path: str, name: str, task: Mapping[str, Any], scope: Scope) -> Node:
        """A task of a DAG."""
        reference = task["componentRef"]["name"]
        if any(needed not in scope.produced for needed in needs(task)):
            return Node(path, name, State.WAITING, reference, task, scope=scope)
        inputs = _inputs(self.pipeline.component(reference), task, scope)
        artifacts = {key: _artifacts_of(selector, scope)
                     for key, selector in task.get("inputs", {}).get("artifacts", {}).items()}
        iterator = task.get("parameterIterator")
        if iterator is None:
            return self.component(path, name, task, inputs, artifacts, scope)
        items = iterator["items"]
        listed = items["raw"] if "raw" in items else inputs[items["inputParameter"]]
        values = json.loads(listed) if isinstance(listed, str) else listed
        children = tuple(self.component(f"{path}/{index}", f"{name}-{index}", task,
                                        {**inputs, iterator["itemInput"]: value}, artifacts, scope)
                         for index, value in enumerate(values))
        state = _state_of(children)
        outputs, collected = {}, {}
        if state is State.SUCCEEDED:
            defined = self.pipeline.component(reference).get("outputDefinitions", {})
            outputs = {key: _collected(children, key) for key in defined.get("parameters", {})}
            collected = {key: [one for child in children for one in child.output_artifacts[key]]
                         for key in defined.get("artifacts", {})}
        limit = int(task.get("iteratorPolicy", {}).get("parallelismLimit", 0))
        return Node(path, name, state, reference, task, inputs, outputs, artifacts, collected, scope,
                    frozenset(outputs), children, limit)

    def component(self, path: str, name: str, task: Mapping[str, Any], inputs: Mapping[str, Any],
                  artifacts: Artifacts, scope: Scope) -> Node:
        reference = task["componentRef"]["name"]
        component = self.pipeline.component(reference)
        if "dag" in component:
            return self.dag(path, name, reference, task, component, inputs, artifacts, scope)
        seen = self.seen.get(path, Seen(State.READY))
        return Node(path, name, seen.state, reference, task, inputs, seen.outputs, artifacts, seen.artifacts, scope)


def _artifacts_of(selector: Mapping[str, Any], scope: Scope) -> list[dict[str, Any]]:
    """The artifacts that an input names in its DAG."""
    if "taskOutputArtifact" in selector:
        source = selector["taskOutputArtifact"]
        return scope.produced_artifacts[source["producerTask"]][source["outputArtifactKey"]]
    return scope.artifacts[selector["componentInputArtifact"]]


def _collected(iterations: tuple[Node, ...], key: str) -> list[Any]:
    """One output of every iteration. What a loop inside has collected is laid end to end."""
    found: list[Any] = []
    for one in iterations:
        found += one.outputs[key] if key in one.gathered else [one.outputs[key]]
    return found


def needs(task: Mapping[str, Any]) -> set[str]:
    """The siblings a task waits for, named outright or by their outputs."""
    inputs = task.get("inputs", {})
    selectors = (*inputs.get("parameters", {}).values(), *inputs.get("artifacts", {}).values())
    by_value = (one[kind]["producerTask"] for one in selectors for kind in ("taskOutputParameter", "taskOutputArtifact")
                if kind in one)
    return {*task.get("dependentTasks", ()), *by_value}


def in_order(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every task after those it needs; by name where the needs leave it open."""
    ordered: list[str] = []
    left = {name: needs(task) for name, task in tasks.items()}
    while left:
        free = sorted(name for name, needed in left.items() if needed <= set(ordered))
        if not free:
            raise Refused(f"the tasks {sorted(left)} wait for each other, or for a task that is not there")
        ordered += free
        left = {name: needed for name, needed in left.items() if name not in free}
    return ordered


def _state_of(children: tuple[Node, ...]) -> State:
    states = {leaf.state for child in children for leaf in child.leaves()}
    if states <= {State.SUCCEEDED}:
        return State.SUCCEEDED
    if State.FAILED in states and State.RUNNING not in states:
        return State.FAILED
    return State.RUNNING if states & {State.RUNNING, State.SUCCEEDED} else State.READY


def _inputs(component: Mapping[str, Any], task: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    """A task's input parameters. Placeholders in constants name the task's other inputs."""
    given: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, selector in task.get("inputs", {}).get("parameters", {}).items():
        if "runtimeValue" in selector:
            constants[name] = selector["runtimeValue"].get("constant")
            continue
        found, value = look_up(selector, scope)
        if found:
            given[name] = _at_path(value, selector.get("parameterExpressionSelector"))
    every = {**given, **constants}
    given |= {name: filled(value, every) if isinstance(value, str) else value for name, value in constants.items()}
    return _typed(component.get("inputDefinitions", {}).get("parameters", {}), given)


def look_up(selector: Mapping[str, Any], scope: Scope) -> tuple[bool, Any]:
    """(whether it is given, the value) of one input selector in its DAG."""
    if "taskOutputParameter" in selector:
        source = selector["taskOutputParameter"]
        produced = scope.produced.get(source["producerTask"], {})
        return source["outputParameterKey"] in produced, produced.get(source["outputParameterKey"])
    if "componentInputParameter" in selector:
        return selector["componentInputParameter"] in scope.inputs, scope.inputs.get(
            selector["componentInputParameter"])
    return "runtimeValue" in selector, selector.get("runtimeValue", {}).get("constant")


def _at_path(value: Any, selector: str | None) -> Any:
    if selector is None:
        return value
    found = json.loads(value) if isinstance(value, str) else value
    for key in re.findall(r'\["([^"]+)"\]', selector):
        found = found[key]
    return found


def _typed(defined: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values in the types of their definitions, defaults where nothing was given."""
    values = {name: one["defaultValue"] for name, one in defined.items() if "defaultValue" in one} | dict(given)
    return {name: _cast(value, defined.get(name, {}).get("parameterType")) for name, value in values.items()
            if value is not None}


def _cast(value: Any, kind: str | None) -> Any:
    value = as_written(value)
    if kind == "NUMBER_INTEGER" and isinstance(value, str | float):
        return int(value)
    if kind == "NUMBER_DOUBLE" and isinstance(value, str):
        return float(value)
    if kind == "STRING" and not isinstance(value, str):
        return json.dumps(value)
    if kind in ("LIST", "STRUCT", "BOOLEAN") and isinstance(value, str):
        return json.loads(value.lower() if kind == "BOOLEAN" else value)
    return value


def as_written(value: Any) -> Any:
    """A value as it looks after the real backend has written it: numbers are doubles, whole ones without a point."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: as_written(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(one) for one in value]
    return value


def executor_input(pipeline: Pipeline, node: Node, root: str = "") -> dict[str, Any]:
    """What the launcher hands a component: its inputs, and where it may put its outputs.

    root   URI below which the run's artifacts lie; the driver of the real backend adds a random part for each task
    """
    defined = pipeline.component(node.component).get("outputDefinitions", {})
    outputs: dict[str, Any] = {"outputFile": OUTPUT_FILE}
    if declared := defined.get("parameters", {}):
        outputs["parameters"] = {name: {"outputFile": f"{OUTPUT_PARAMETERS}/{name}"} for name in declared}
    if declared := defined.get("artifacts", {}):
        outputs["artifacts"] = {name: {"artifacts": [{
            "name": name, "type": one["artifactType"], "uri": f"{root}/{node.path}/{name}", "metadata": {}}]}
            for name, one in declared.items()}
    inputs: dict[str, Any] = {"parameterValues": dict(node.inputs)}
    if node.input_artifacts:
        inputs["artifacts"] = {name: {"artifacts": given} for name, given in node.input_artifacts.items()}
    return {"inputs": inputs, "outputs": outputs}


def local_path(uri: str) -> str | None:
    """Where the launcher has an artifact's file in the pod; None for a URI that it does not know."""
    for scheme, folder in (("gs://", "/gcs/"), ("s3://", "/s3/"), ("minio://", "/minio/")):
        if uri.startswith(scheme):
            return folder + uri.removeprefix(scheme)
    return None


def merged_artifacts(handed: Mapping[str, Any], files: Mapping[str, bytes], root: str) -> Artifacts:
    """A component's output artifacts, from what it was handed and the file that its executor wrote.

    Like `uploadOutputArtifacts` of the real launcher (kubeflow/pipelines, backend/src/v2/component/launcher_v2.go): of
    each the first is merged, URI and metadata; one whose URI is known and not below the run's root fails the task, one
    of another scheme is recorded and nothing is uploaded. All numbers are doubles, as protobuf has them.
    """
    written = json.loads(files.get(OUTPUT_FILE, b"{}") or b"{}").get("artifacts", {})
    found = {}
    for name, given in handed["outputs"].get("artifacts", {}).items():
        (artifact,) = given["artifacts"]
        said = next(iter(written.get(name, {}).get("artifacts", ())), {})
        uri = said.get("uri") or artifact["uri"]
        if local_path(uri) is not None and not uri.startswith(f"{root}/"):
            raise Refused(f"failed to upload output artifact {name!r}: URI {uri!r} does not have expected bucket "
                          f"prefix {root!r}")
        found[name] = [{**artifact, "uri": uri, "metadata": artifact["metadata"] | said.get("metadata", {})}]
    return found


def outputs_of(pipeline: Pipeline, component: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """A component's output parameters from the files it wrote, by their paths."""
    declared = pipeline.component(component).get("outputDefinitions", {}).get("parameters", {})
    written = json.loads(files.get(OUTPUT_FILE, b"{}") or b"{}").get("parameterValues", {})
    found: dict[str, Any] = {}
    for name, one in declared.items():
        alone = files.get(f"{OUTPUT_PARAMETERS}/{name}")
        if alone is not None:
            text = alone.decode()
            kind = one.get("parameterType")
            found[name] = text if kind == "STRING" else json.loads(text.lower() if kind == "BOOLEAN" else text)
        elif name in written:
            found[name] = written[name]
        elif not one.get("isOptional"):
            raise Refused(f"the component put out no parameter {name!r}")
    return _typed(declared, found)


def filled(text: str, inputs: Mapping[str, Any], *, outputs: Mapping[str, Any] | None = None,
           constants: Mapping[str, str] | None = None, artifacts: Mapping[str, Any] | None = None) -> str:
    """A text with its placeholders replaced. `outputs`, `artifacts` (those of the inputs) and the whole executor input
    are known to containers alone."""
    whole = {"inputs": {"parameterValues": dict(inputs), **({"artifacts": artifacts} if artifacts else {})},
             "outputs": dict(outputs or {})}

    def one(match: re.Match[str]) -> str:
        inside = match.group(1)
        if outputs is not None and inside in ("", ".json_escape[1]"):
            result = json.dumps(whole)
            return json.dumps(result)[1:-1] if inside else result
        if outputs is not None and inside in (".outputs.output_file", ".outputMetadataUri"):
            return str(outputs["outputFile"])
        if (named := _INPUT.match(inside)) is not None:
            if named.group(1) not in inputs:
                raise Refused(f"{text!r} names the input {named.group(1)!r}, which was not given")
            value = inputs[named.group(1)]
            return value if isinstance(value, str) else json.dumps(value)
        if outputs is not None and (named := _OUTPUT.match(inside)) is not None:
            return str(outputs["parameters"][named.group(1)]["outputFile"])
        if outputs is not None and (named := _ARTIFACT.match(inside)) is not None:
            side, name, what = named.groups()
            uri = str(whole[side]["artifacts"][name]["artifacts"][0]["uri"])
            return uri if what == "uri" else str(local_path(uri))
        return (constants or {}).get(match.group(0), match.group(0))

    return _PLACEHOLDER.sub(one, text)

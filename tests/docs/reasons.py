"""Reasons of conditions and of endpoint histories that are not the reason of an error class.

`REASONS` is the second table of docs/reference/errors.md; `PROGRESS` lists reasons that ask for nothing. `created`
reads the reasons from the sources: the literals that reach a condition, a failed run or an entry of a history.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.house.sources import ROOT, modules, parsed


class Reason(NamedTuple):
    """One row of the page."""

    name: str
    where: str
    cause: str
    action: str


REASONS = (
    Reason("AcceptanceCollapsed", "endpoint: `RolledBack`, history; job: `Serving`, `Failed`",
           "The acceptance length of live requests fell below `serve.min_acceptance_ratio` of the proven one. The "
           "revision was rejected in its canary, or the endpoint went back to the revision before.",
           "`eyrie endpoints history ENDPOINT` has both values. Check that the endpoint serves the target and the "
           "sampling that the drafter was proven with. If the traffic has changed, train on recent requests "
           "(`serve.record_prompts`, `promotion.drift`)."),
    Reason("AlreadyFinished", "DrafterJob: `Suspended=False`", "`spec.suspend` was set after the job had ended.",
           "Nothing; to stop a job, set it earlier."),
    Reason("AwaitsApproval", "job: `Promoted=False`; history",
           "The drafter passes, and `promotion.mode` is `manual`.",
           "`eyrie endpoints promote ENDPOINT --job JOB`."),
    Reason("CanaryFailed", "endpoint: `RolledBack`, history; job: `Serving`, `Failed`",
           "Requests to the new revision failed while it had a share of them. The revision before serves.",
           "Read the engine's log for the cause (`endpoints/NAME/engines/REVISION/engine.log` in `EYRIE_HOME`, or the "
           "pod's log), correct it, then promote again: `eyrie endpoints promote ENDPOINT --job JOB`."),
    Reason("ChecksFailed", "job: `Promoted=False`; history",
           "No drafter is promoted: a check that is not about speed failed, for example output changed or a figure is "
           "missing.",
           "The message names the checks; `eyrie job JOB` shows their values and thresholds. Changed output: see the "
           "likely cause there. A missing figure: run its stage again (`eyrie retry JOB --from STAGE`). A bound that "
           "is too strict for you: change that field of `promotion` and submit again."),
    Reason("DrafterDamaged", "endpoint: `RolledBack`, history",
           "An engine had to start, and the serving drafter's files are missing or differ from their digests. The "
           "endpoint serves the target without a drafter.",
           "Run the stage that made it again (`eyrie retry JOB --from train`), or restore its files; then promote "
           "again."),
    Reason("EndpointServes", "DrafterJob: `Deleted=False`",
           "The object is to be deleted while an endpoint serves a drafter of its job.",
           "Promote another drafter or `eyrie endpoints rollback ENDPOINT`, or annotate the object with "
           "`eyrie.dev/outside=keep` ([custom resources](../custom_resources.md))."),
    Reason("EndpointUnknown", "DraftEndpoint: `Accepted=False`",
           "The object shows an endpoint that is not in this database.",
           "Restore the database ([operations](../operations.md#backup-and-restore)), or delete the object."),
    Reason("EngineDied", "endpoint: `Serving=False`, `RolledBack`, history; job: `Serving`, `Failed`",
           "The engine's process ended. A serving one is restarted with pauses up to 30 s; a new revision is rejected, "
           "and the one before serves.",
           "The message ends with the engine's last lines: usually memory (lower `serve.max_concurrency`) or a port "
           "in use. Correct the cause. Promote a rejected drafter again: `eyrie endpoints promote ENDPOINT --job "
           "JOB`."),
    Reason("FeatureUnavailable", "endpoint: `Complete=False`",
           "The cluster lacks an API that a setting of the endpoint needs; the endpoint serves without it.",
           "Install what the message names, or remove the setting."),
    Reason("HealthTimeout", "endpoint: `RolledBack`, history; job: `Serving`, `Failed`",
           "The new engine was not healthy in time; the revision before serves.",
           "Read the engine's log. If it was still loading, raise `serve.health_timeout_s`, on a cluster "
           "`cluster.serving.startup_timeout_s`; otherwise correct what the log names. Then promote again."),
    Reason("IncumbentKept", "job: `Promoted=False`; history",
           "The drafter passes, and is not faster than the one that serves by "
           "`promotion.min_speedup_over_incumbent`.",
           "Nothing; the serving drafter stays. For a faster one, train on more data or compare families "
           "([choosing a family](../choosing_a_family.md))."),
    Reason("InvalidSpec", "DrafterJob, DraftEndpoint: `Accepted=False`; DrafterJob: `Failed`",
           "The object's `spec` breaks a rule that the schema of the resource cannot state.",
           "The message names field, value and rule; correct the object ([job reference](job.md))."),
    Reason("JobUnknown", "DrafterJob: `Accepted=False`",
           "The object names a job that is not in this database, or that belongs to another object.",
           "Restore the database, or apply the object again without the annotation that the message names."),
    Reason("NameTaken", "DraftEndpoint: `Accepted=False`",
           "An older object in another namespace, or another project, has this endpoint name.",
           "Apply the endpoint under another name."),
    Reason("NotFaster", "job: `Promoted=False`; history",
           "No drafter is promoted: none is faster than the target without one, or than what it had to beat, by the "
           "margins of `promotion`.",
           "The message has the figures, with the tau that would be needed at each load. Train on more data or on the "
           "target's own answers (`regenerate`), compare families ([choosing a family](../choosing_a_family.md)), or "
           "remove loads at which speculation cannot pay from `prove.concurrencies`."),
    Reason("NothingRecorded", "endpoint: `Recording=False`",
           "No request of this endpoint is kept, so there is nothing to retrain on when its traffic drifts.",
           "Submit a job for the endpoint with `serve.record_prompts` (one machine) or `promotion.drift.traffic_file` "
           "(a log of your own), or set `promotion.drift.action: ignore`."),
    Reason("NothingToServe", "endpoint: `Serving=False`", "No revision of the endpoint has been promoted.",
           "`eyrie endpoints promote ENDPOINT --job JOB`."),
    Reason("Off", "endpoint: `Serving=False`; job: `Serving=False`", "The endpoint was switched off on request.",
           "`eyrie endpoints on ENDPOINT`."),
    Reason("PipelineFailed", "job: `Failed`", "The run failed, and no stage reported a failure.",
           "Read the log that the message names, on Kubeflow that of the run, and correct the cause; then "
           "`eyrie retry JOB`."),
    Reason("PromotionOff", "job: `Promoted=False`; history", "`promotion.mode` is `never`.",
           "Nothing; `eyrie endpoints promote ENDPOINT --job JOB` serves the drafter all the same."),
    Reason("ReplacingEngine", "endpoint: `Serving=False`, history",
           "The serving engine and its successor do not fit the memory together: the first is stopped before the "
           "second starts, and requests wait.",
           "Wait. To avoid the gap next time, serve on a machine or GPU with memory for both."),
    Reason("RolledBack", "job: `Serving`, `Failed`; history",
           "The revision was replaced by an earlier one: on request, or by the reason in the message.",
           "`eyrie endpoints history ENDPOINT` shows who and why; `eyrie endpoints promote` serves it again."),
    Reason("RunDied", "job: `Accepted`",
           "The run's process died, several times without getting further, and is started again after a pause.",
           "Read the end of its log in the message. If something outside ended the process (a drained machine, a "
           "store that did not answer), there is nothing to do; otherwise correct what the log names."),
    Reason("RunKeepsDying", "job: `Failed`",
           "The run's process was started at least 5 times within at least 5 minutes, and ended each time without "
           "getting further.",
           "If the log in the message names an error, correct it, then `eyrie retry JOB`. If it names none, look for "
           "the out-of-memory killer in the system's log: retry with more memory, or submit the job with a lower "
           "`regenerate.concurrency` or `train.max_tokens_per_batch`."),
    Reason("RunTerminated", "job: `Failed`", "Somebody terminated the run in Kubeflow Pipelines.",
           "`eyrie retry JOB`: it resumes after its finished stages."),
    Reason("Suspended", "DrafterJob: `Accepted=False`, `Suspended`", "`spec.suspend` is true.",
           "Set `spec.suspend` to false: the job is submitted, or resumes after its finished stages."),
    Reason("TargetDiffers", "DraftEndpoint: `Accepted=False`",
           "An endpoint of that name serves another target; an endpoint keeps its target.",
           "Apply the endpoint under another name."),
    Reason("TooNoisy", "job: `Promoted=False`; history",
           "The measurement is inconclusive: at a load in `prove.concurrencies` the interval still includes a "
           "slow-down and the required speed-up after `prove.most_pairs` pairs of blocks, or a required suite has too "
           "few prompts. What served before continues to serve; of a first job that is the target alone.",
           "The message says what else ran on the machine and how many pairs would be enough. Measure again when it is "
           "quiet (`eyrie retry JOB --from prove`), or submit the job with a larger `prove.most_pairs`; for a suite, "
           "with a larger `max_prompts`."),
    Reason("TrafficDrifted", "endpoint: history",
           "Acceptance stayed below `promotion.drift.ratio` of the proven one for several windows in a row.",
           "Start the job that the entry offers (`data.job`), or set `promotion.drift.action: retrain` to have it "
           "started. If none is offered, the message says what to set, for example `serve.record_prompts`."),
)
"""Reasons that a user may have to act on, or to understand, with what to do."""

PROGRESS = frozenset((
    "Activated", "AllAvailable", "CanaryStep", "Cancelled", "Completed", "Created", "Deploying", "EndpointAccepted",
    "Finished", "Healthy", "JobAccepted", "Promoted", "Proposed", "Recorded", "Requested", "Resumed",
    "RetrainingStarted", "Running", "Starting", "Stopping", "Superseded", "SwitchedOff", "SwitchedOn", "Watched",
))
"""Reasons of what goes as it should."""

POSITIONS = {"observe": 3, "_condition": 2, "RunFailed": 2, "Reject": 1, "RollBack": 1, "ObservedServing": 1,
              "EndpointPlan": 2, "record_history": 4, "_histories.record": 2, "refuse_job": 1, "refuse_endpoint": 1}
"""Calls that create a condition, a failed run or an entry of a history, with the position of the reason."""

NAMED = ("Condition", "ResourceCondition", "Wait", "WaitingPod", "roll_back")
"""Calls that take the reason by name."""

_STATUSES = ("True", "False", "Unknown", "None")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def created() -> dict[str, str]:
    """Reason -> one file that creates it. A reason that is read from an error (`error.reason`) has no literal; it is in
    the table of errors."""
    own = {path: {one.name: one for one in parsed(path).body if isinstance(one, _Function)} for path in modules()}
    every = {name: function for functions in own.values() for name, function in functions.items()}
    return {reason: str(path.relative_to(ROOT)) for path in modules()
            for scope in _scopes(parsed(path)) for expression in _reasons(scope)
            for reason in _literals(expression, scope, {**every, **own[path]}, frozenset())}


def calls() -> set[str]:
    """Those of the calls above that are in the sources."""
    return {name for path in modules() for node in _nodes(parsed(path)) if isinstance(node, ast.Call)
            if (name := _called(node)) in {*POSITIONS, *NAMED}}


@cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def _scopes(tree: ast.Module) -> Iterator[_Function]:
    return (node for node in _nodes(tree) if isinstance(node, _Function))


def _reasons(scope: _Function) -> Iterator[ast.expr]:
    """The expressions that a function passes as a reason, and the default of its own parameter `reason`."""
    given = scope.args
    defaults = [*zip(reversed(given.args), reversed(given.defaults), strict=False),
                *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    yield from (default for one, default in defaults if one.arg == "reason" and default is not None)
    for node in _nodes(scope):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if name in POSITIONS:
            # `f(a, *parts)`: the reason is among the parts.
            starred = [num for num, one in enumerate(node.args) if isinstance(one, ast.Starred)]
            yield from node.args[min([POSITIONS[name], *starred]):][:1]
        if name in POSITIONS or name in NAMED:
            yield from (one.value for one in node.keywords if one.arg == "reason")


def _literals(expression: ast.AST, scope: _Function, functions: dict[str, _Function],
              seen: frozenset[str]) -> Iterator[str]:
    """The reasons an expression can be: through `or`, a condition, a table, a variable, and what a function returns."""
    if isinstance(expression, ast.Constant):
        text = str(expression.value)
        if re.fullmatch(r"[A-Z][A-Za-z]+", text) and text not in _STATUSES:
            yield text
        return
    parts: list[tuple[ast.AST, _Function]] = []
    if isinstance(expression, ast.BoolOp | ast.IfExp | ast.Tuple | ast.Starred | ast.Subscript | ast.Dict):
        parts = [(one, scope) for one in ast.iter_child_nodes(expression) if isinstance(one, ast.expr)]
    elif isinstance(expression, ast.Name) and expression.id not in seen:
        seen |= {expression.id}
        parts = [(one.value, scope) for one in _nodes(scope) if isinstance(one, ast.Assign)
                 and any(isinstance(target, ast.Name) and target.id == expression.id for target in one.targets)]
    elif isinstance(expression, ast.Call) and _called(expression) in functions and _called(expression) not in seen:
        function = functions[_called(expression)]
        seen |= {function.name}
        parts = [(one, scope) for one in expression.args if isinstance(one, ast.Constant)]
        parts += [(one.value, function) for one in _nodes(function) if isinstance(one, ast.Return) and one.value]
    for part, where in parts:
        yield from _literals(part, where, functions, seen)


def _called(call: ast.Call) -> str:
    """`f` of `f(...)` and of `x.f(...)`; `_histories.record`, since others have a method `record` too."""
    name = call.func
    if isinstance(name, ast.Name):
        return name.id
    if not isinstance(name, ast.Attribute):
        return ""
    if name.attr in ("record", "observe"):
        return f"{name.value.attr if isinstance(name.value, ast.Attribute) else ''}.{name.attr}"
    return name.attr

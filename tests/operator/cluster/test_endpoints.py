"""Endpoints tended against a double of the API server: what is written, what is not, and what a death costs."""

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.promotion import CanarySpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition, Endpoint
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.planning.placement import read_profile
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.cluster import endpoints as cluster_endpoints
from eyrie_operator.cluster.client import Cluster
from eyrie_operator.cluster.endpoints import EndpointReconciler, OwnerOf
from eyrie_operator.cluster.leases import NotLeader
from eyrie_operator.conditions import find
from eyrie_operator.manifests.deployment import REVISION_LABEL, Owner
from eyrie_operator.unscheduled import GRACE
from tests.api.samples import job_body
from tests.operator.cluster.apiserver import CORE, GATEWAY, ApiServer, serving
from tests.operator.cluster.engine_pages import EnginePages
from tests.operator.test_unscheduled import pod as unscheduled_pod

HOME = "/var/lib/eyrie"
CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)
ENTRY = "/api/v1/namespaces/serving/services/eyrie-chat"
SPACES = "/apis/apps/v1/namespaces/serving/deployments"


class Killed(BaseException):
    """The operator ends here and now."""


class Harness:
    """One database and one double."""

    def __init__(self, home: Path, server: ApiServer, profile: dict[str, Any] | None = None) -> None:
        self.server = server
        path = home / "profile.yaml"
        placement = {"image": "eyrie-workers:test", "requests": {"cpu": "1000m"}}
        stages = placement | {"work": {"kind": "volume", "claim": "work"}}
        path.write_text(yaml.safe_dump({
            "kubeflow": {"url": "http://nowhere"}, "home": HOME, "stages": stages,
            "serving": {"namespace": "serving", "placement": placement, **(profile or {})}}))
        self.settings = Settings(home=home, cluster_profile=path)
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.endpoints, self.histories = Endpoints(self.database), Histories(self.database)
        self.jobs = Jobs(self.database)
        self.owner: Owner | None = None

    def reconciler(self, check: Callable[[], None] | None = None,
                   owner_of: OwnerOf | None = None, clock: Clock = utc_now) -> EndpointReconciler:
        """A restarted operator, without state."""
        profile = read_profile(self.settings.cluster_profile or Path())
        assert profile.serving is not None
        return EndpointReconciler(self.settings, profile, profile.serving, self.database, Cluster(check),
                              owner_of or (lambda _namespace, _name, _now: self.owner), clock)

    def create(self, name: str = "chat", **serve: Any) -> Endpoint:
        served = EndpointServeSpec(endpoint=name, **serve)
        return self.endpoints.create(name, TargetSpec(model="quickstart"), served, "q")

    def propose(self, job_id: str | None = None, tau: float | None = None) -> int:
        return self.endpoints.propose("chat", job_id=job_id, checkpoint="c1", tree=CHAIN, reason="better", tau=tau,
                                      drafter_dir=f"{HOME}/jobs/j1/stages/train/a/checkpoints/c1").number

    def promoted_job(self, canary: CanarySpec) -> str:
        spec = JobSpec.model_validate(job_body())
        promotion = spec.promotion.model_copy(update={"canary": canary})
        return self.jobs.submit(derive(spec.model_copy(update={"promotion": promotion}))).id

    def serve_bare(self) -> EndpointReconciler:
        """The endpoint chat, with the target alone."""
        self.create()
        reconciler = self.reconciler()
        settle(reconciler)
        self.server.run("eyrie-chat-r1")
        settle(reconciler)
        assert self.chat.active_revision == 1
        return reconciler

    @property
    def chat(self) -> Endpoint:
        return self.endpoints.get("chat")

    def condition(self, kind: str) -> Condition:
        found = find(self.chat.conditions, kind)
        assert found is not None
        return found

    @property
    def led_to(self) -> str:
        """The revision that the stable Service leads to."""
        selector: dict[str, str] = self.server.objects[ENTRY]["spec"]["selector"]
        return selector[REVISION_LABEL]


def settle(reconciler: EndpointReconciler, name: str = "chat") -> None:
    """Look until there is nothing to do at once."""
    for _ in range(10):
        reconciler.sweep()
        if reconciler.reconcile(name) != 0.0:
            return
    raise AssertionError("it never rests")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    made = ApiServer()
    with serving(made, tmp_path, monkeypatch):
        yield made


@pytest.fixture
def harness(tmp_path: Path, server: ApiServer) -> Iterator[Harness]:
    made = Harness(tmp_path, server)
    yield made
    made.database.close()


def test_an_engine_that_no_node_fits_is_waited_for_and_its_condition_says_why_until_it_has_one(
        harness: Harness) -> None:
    harness.create()
    now = [utc_now()]
    reconciler = harness.reconciler(clock=lambda: now[0])
    settle(reconciler)
    labels = harness.server.of("Deployment")["eyrie-chat-r1"]["spec"]["template"]["metadata"]["labels"]
    harness.server.put("/api/v1/namespaces/serving/pods/p", unscheduled_pod(since=now[0], labels=labels))
    settle(reconciler)
    assert harness.condition("Serving").reason == "Deploying"
    now[0] += GRACE
    settle(reconciler)
    waits = harness.condition("Serving")
    assert (waits.status, waits.reason) == ("Unknown", "WaitingForNodes")
    assert "node(s) didn't match" in waits.message
    assert "hint: scale the pool up" in waits.message
    assert harness.chat.candidate_revision == 1, "waited for, not rejected"
    harness.server.set_status("Pod", "p", {"phase": "Pending",
                                           "conditions": [{"type": "PodScheduled", "status": "True"}]})
    settle(reconciler)
    assert harness.condition("Serving").reason == "Deploying"


def test_a_row_becomes_an_engine_and_is_activated_when_it_answers(harness: Harness) -> None:
    harness.create(replicas=2)
    reconciler = harness.reconciler()
    settle(reconciler)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}
    assert harness.server.of("Deployment")["eyrie-chat-r1"]["spec"]["replicas"] == 2
    assert harness.led_to == "none"
    assert harness.condition("Serving").status == "Unknown"
    harness.server.run("eyrie-chat-r1", available=1)
    settle(reconciler)
    assert harness.chat.active_revision is None
    harness.server.run("eyrie-chat-r1", available=2)
    settle(reconciler)
    assert harness.chat.active_revision == 1
    assert harness.chat.url == "http://eyrie-chat.serving.svc/v1"
    assert harness.condition("Serving").reason == "Healthy"


def test_a_new_revision_takes_over_by_the_service_and_then_the_old_one_goes(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    number = harness.propose()
    settle(reconciler)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1", "eyrie-chat-r2"}
    assert harness.led_to == "1"
    harness.server.run("eyrie-chat-r2")
    settle(reconciler)
    assert harness.led_to == str(number) == "2"
    assert harness.chat.active_revision == 2
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r2"}
    [container] = harness.server.of("Deployment")["eyrie-chat-r2"]["spec"]["template"]["spec"]["containers"]
    assert f'"{HOME}/jobs/j1/stages/train/a/checkpoints/c1"' in " ".join(container["command"])


def test_replicas_are_reported_and_one_that_is_missing_ends_nothing(harness: Harness) -> None:
    harness.create(replicas=3)
    reconciler = harness.reconciler()
    settle(reconciler)
    harness.server.run("eyrie-chat-r1", available=3)
    settle(reconciler)
    assert harness.condition("Serving").message.endswith("3 of 3 replicas are available")
    harness.server.run("eyrie-chat-r1", available=1)
    settle(reconciler)
    assert harness.condition("Serving").status == "True"
    assert harness.condition("Serving").message.endswith("1 of 3 replicas are available")


def test_the_bare_target_waits_for_whoever_repairs_what_keeps_it_from_being_served(harness: Harness) -> None:
    harness.create(engine=EngineSpec(kind="sglang"), hardware_profile="abacus")
    reconciler = harness.reconciler()
    settle(reconciler)
    assert (harness.condition("Serving").status, harness.condition("Serving").reason) == ("False", "Unlaunchable")
    assert harness.chat.candidate_revision == 1
    harness.create(engine=EngineSpec(kind="sglang"), hardware_profile="cpu")
    harness.server.refused.add(("Deployment", "eyrie-chat-r1"))
    settle(reconciler)
    assert harness.condition("Serving").reason == "ClusterRejected"
    harness.server.refused.clear()
    settle(reconciler)
    harness.server.run("eyrie-chat-r1")
    settle(reconciler)
    assert harness.condition("Serving").reason == "Healthy"


def test_what_is_asked_for_and_cannot_be_had_here_is_reported_and_stops_nothing(harness: Harness) -> None:
    harness.create(record_prompts=10)
    settle(harness.reconciler())
    complete = harness.condition("Complete")
    assert (complete.status, complete.reason) == ("False", "FeatureUnavailable")
    assert "record_prompts" in harness.condition("Complete").message
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}


def test_an_engine_that_keeps_dying_never_takes_over(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    harness.propose()
    settle(reconciler)
    pod = {"apiVersion": "v1", "kind": "Pod", **harness.server.of("Deployment")["eyrie-chat-r2"]["spec"]["template"]}
    pod["metadata"] = {**pod["metadata"], "name": "r2-pod", "namespace": "serving"}
    harness.server.put("/api/v1/namespaces/serving/pods/r2-pod", pod)
    harness.server.set_status("Pod", "r2-pod", {"containerStatuses": [{
        "name": "engine", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 65, "message": "no such tensor"}}}]})
    settle(reconciler)
    assert harness.led_to == "1"
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}
    assert (harness.condition("RolledBack").status, harness.condition("RolledBack").reason) == ("True", "EngineDied")
    assert "no such tensor" in harness.condition("RolledBack").message
    assert harness.chat.revisions[1].state == "rejected"


def test_endpoints_at_rest_cost_no_writes_and_a_list_per_kind_for_all_of_them(harness: Harness) -> None:
    names = [f"e{number}" for number in range(8)]
    reconciler = harness.reconciler()
    for name in names:
        harness.create(name)
        settle(reconciler, name)
        harness.server.run(f"eyrie-{name}-r1")
        settle(reconciler, name)
    fresh = harness.reconciler()  # another operator, which has written none of it
    changed = fresh.sweep()
    assert set(changed) == set(names)
    before = [one.updated_at for one in harness.endpoints.list().items]
    harness.server.requests.clear()
    assert fresh.sweep() == ()
    listed = harness.server.requests["GET"]
    assert all((fresh.reconcile(name) or 0.0) > 0.0 for name in names)
    assert harness.server.num_writes() == 0
    assert harness.server.requests["GET"] == listed <= 6
    assert [one.updated_at for one in harness.endpoints.list().items] == before


def test_killed_at_any_write_another_operator_finishes_and_users_are_always_led_to_an_engine(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    deaths = 0

    def dying(at: int) -> Callable[[], None]:
        count = itertools.count(1)

        def check() -> None:
            assert f"eyrie-chat-r{harness.led_to}" in harness.server.of("Deployment")
            if next(count) == at:
                raise Killed
        return check

    for revision in (2, 3):  # the first death of each operator comes later and later
        harness.endpoints.propose("chat", job_id=None, checkpoint=f"c{revision}", tree=CHAIN, reason="better",
                                  drafter_dir=f"{HOME}/jobs/j1/stages/train/a/checkpoints/c{revision}")
        for at in itertools.count(1):
            one = harness.reconciler(dying(at))
            try:
                for _ in range(10):
                    settle(one)
                    if f"eyrie-chat-r{revision}" in harness.server.of("Deployment"):
                        harness.server.run(f"eyrie-chat-r{revision}")
                    if harness.chat.active_revision == revision and one.reconcile("chat") != 0.0:
                        break
                break
            except Killed:
                deaths += 1
    settle(reconciler)
    assert deaths >= 6
    assert harness.chat.active_revision == 3
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r3"}
    assert {one.state for one in harness.chat.revisions[:2]} == {"retired"}
    assert [one.kind for one in harness.histories.read("chat").items if one.kind == "activated"] == ["activated"] * 3


def test_an_operator_that_begins_looks_before_it_writes(harness: Harness) -> None:
    harness.owner = Owner(uid="u-7", name="chat")
    harness.serve_bare()
    owners: list[Owner | None] = []

    def nothing_heard(_namespace: str, _name: str, now: Owner | None) -> Owner | None:
        owners.append(now)
        return now

    fresh = harness.reconciler(owner_of=nothing_heard)
    written = harness.server.num_writes()
    fresh.cache.discover()
    fresh.reconcile("chat")
    assert owners == [harness.owner]
    assert harness.server.num_writes() == written


def test_who_does_not_lead_writes_neither_objects_nor_rows(harness: Harness) -> None:
    def deposed() -> None:
        raise NotLeader("another leads", "leave it")

    harness.create()
    before = harness.chat
    with pytest.raises(NotLeader):
        settle(harness.reconciler(deposed))
    assert harness.server.objects == {}
    harness.reconciler().reconcile("chat")
    harness.server.run("eyrie-chat-r1")
    condition = harness.chat
    stale = harness.reconciler(deposed)
    with pytest.raises(NotLeader):
        settle(stale)
    assert harness.chat == condition != before


def test_what_somebody_changed_by_hand_is_put_right(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    path = f"{SPACES}/eyrie-chat-r1"
    found = harness.server.objects[path]
    harness.server.put(path, {**found, "spec": {**found["spec"], "replicas": 7}})
    assert reconciler.sweep() == ("chat",)
    settle(reconciler)
    assert harness.server.objects[path]["spec"]["replicas"] == 1
    harness.server.run("eyrie-chat-r1")  # its controller has seen the change
    entry = harness.server.objects[ENTRY]
    selector = {**entry["spec"]["selector"], REVISION_LABEL: "9"}
    harness.server.put(ENTRY, {**entry, "spec": {**entry["spec"], "selector": selector}})
    settle(reconciler)
    assert harness.led_to == "1"


def test_an_object_of_the_same_name_that_is_somebodys_is_not_taken_over(harness: Harness) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "eyrie-chat", "namespace": "serving"},
              "spec": {"selector": {"app": "theirs"}}}
    harness.server.put(ENTRY, theirs)
    harness.create()
    settle(harness.reconciler())
    assert harness.server.objects[ENTRY]["spec"] == theirs["spec"]
    assert harness.condition("Serving").reason == "Undeployable"
    assert "Service eyrie-chat" in harness.condition("Serving").message


def test_a_candidate_the_server_refuses_is_rejected_and_what_served_goes_on(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    harness.server.refused.add(("Deployment", "eyrie-chat-r2"))
    harness.propose()
    settle(reconciler)
    assert harness.chat.candidate_revision is None
    assert harness.condition("RolledBack").reason == "ClusterRejected"
    assert "admission webhook says no" in harness.condition("RolledBack").message
    assert harness.condition("Serving").status == "True"
    settle(reconciler)
    assert set(harness.server.of("Service")) == {"eyrie-chat", "eyrie-chat-r1-http"}


def test_a_drafter_nothing_is_known_of_is_rejected_before_anything_is_started(harness: Harness) -> None:
    served = EndpointServeSpec(engine=EngineSpec(kind="sglang"))
    harness.endpoints.create("chat", TargetSpec(model="quickstart"), served, "q")
    reconciler = harness.reconciler()
    settle(reconciler)
    harness.server.run("eyrie-chat-r1")
    settle(reconciler)
    harness.propose()
    settle(reconciler)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r1"}
    assert harness.condition("RolledBack").reason == "Undeployable"
    assert "config.json cannot be read" in harness.condition("RolledBack").message


def served_drafter(harness: Harness) -> EndpointReconciler:
    reconciler = harness.serve_bare()
    harness.propose()
    settle(reconciler)
    harness.server.run("eyrie-chat-r2")
    settle(reconciler)
    assert harness.chat.active_revision == 2
    return reconciler


def test_a_served_drafter_that_is_damaged_is_replaced_by_the_target_without_one(harness: Harness) -> None:
    reconciler = served_drafter(harness)
    harness.server.run("eyrie-chat-r2", available=0)
    labels = harness.server.of("Deployment")["eyrie-chat-r2"]["spec"]["template"]["metadata"]["labels"]
    ended = {"terminated": {"exitCode": 74, "message": "model.safetensors differs"}}
    harness.server.put("/api/v1/namespaces/serving/pods/p", {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "serving", "labels": labels},
        "status": {"initContainerStatuses": [
            {"name": "verify-drafter", "restartCount": 1, "state": {}, "lastState": ended}]}})
    settle(reconciler)
    harness.server.run("eyrie-chat-r1")
    settle(reconciler)
    assert (harness.chat.active_revision, harness.led_to) == (1, "1")
    assert "model.safetensors differs" in harness.condition("RolledBack").message
    assert [each.reason for each in harness.histories.read("chat").items if each.kind == "rolled-back"] == [
        "DrafterDamaged"]


def test_a_candidate_goes_ahead_of_a_served_drafter_of_which_nothing_can_be_read_any_more(
        harness: Harness, tmp_path: Path) -> None:
    harness.create(engine=EngineSpec(kind="sglang"))
    for number in (2, 3):
        drafter = tmp_path / f"c{number}"
        drafter.mkdir()
        (drafter / "config.json").write_text(json.dumps({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "max_position_embeddings": 2048}))
        reconciler = harness.reconciler()  # restarted: it has to read the drafters again
        settle(reconciler)
        harness.server.run(f"eyrie-chat-r{number - 1}")
        settle(reconciler)
        assert (harness.chat.active_revision, harness.led_to) == (number - 1, str(number - 1))
        harness.endpoints.propose("chat", job_id=None, checkpoint=f"c{number}", tree=CHAIN, reason="better",
                                  drafter_dir=str(drafter))
        if number == 3:
            (tmp_path / "c2" / "config.json").unlink()
            reconciler = harness.reconciler()
        settle(reconciler)
    assert set(harness.server.of("Deployment")) == {"eyrie-chat-r2", "eyrie-chat-r3"}, "what serves stays"
    assert harness.led_to == "2"
    harness.server.run("eyrie-chat-r3")
    settle(reconciler)
    assert (harness.chat.active_revision, harness.led_to) == (3, "3")


def test_what_stands_is_left_as_it_is_when_the_endpoint_asks_for_what_cannot_be(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    harness.create(engine=EngineSpec(kind="sglang"), hardware_profile="abacus")
    settle(reconciler)
    assert harness.condition("Serving").status == "True"
    assert harness.condition("Serving").reason == "Unlaunchable"
    assert "abacus" in harness.condition("Serving").message
    assert harness.led_to == "1"


def test_switched_off_everything_goes_and_on_again_it_comes_back(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    harness.endpoints.set_desired("chat", "off")
    settle(reconciler)
    assert harness.server.objects == {}
    assert harness.condition("Serving").reason == "Off"
    reconciler.sweep()
    assert not reconciler.cache.known("chat")
    harness.endpoints.set_desired("chat", "on")
    settle(reconciler)
    harness.server.run("eyrie-chat-r1")
    settle(reconciler)
    assert harness.condition("Serving").reason == "Healthy"


def test_objects_belong_to_the_draft_endpoint_while_it_is_to_take_them_along(harness: Harness) -> None:
    harness.owner = Owner(uid="u-7", name="chat")
    reconciler = harness.serve_bare()
    known = reconciler.cache.known("chat")
    assert known
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "u-7" for one in known if one["kind"] != "Pod")
    harness.owner = None
    settle(reconciler)
    reconciler.sweep()
    known = reconciler.cache.known("chat")
    assert known
    assert not any("ownerReferences" in one["metadata"] for one in known if one["kind"] != "Pod")


def test_objects_of_an_unknown_endpoint_are_left_alone(harness: Harness) -> None:
    reconciler = harness.serve_bare()
    other = Database(f"sqlite:///{harness.settings.home}/other.db")
    upgrade(other)
    profile = read_profile(harness.settings.cluster_profile or Path())
    assert profile.serving is not None
    stranger = EndpointReconciler(harness.settings, profile, profile.serving, other, Cluster(), lambda *_: None)
    count = len(harness.server.objects)
    stranger.sweep()
    assert stranger.reconcile("chat") is None
    assert len(harness.server.objects) == count
    other.close()
    settle(reconciler)


def test_a_slow_sweep_does_not_bring_back_what_was_before_a_write(
        harness: Harness, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, list_all, written = harness.serve_bare().cache, Cluster.list_all, list[str]()

    def list_slowly(cluster: Cluster, api: str, kind: str, namespace: str | None = None, **selectors: Any) -> Any:
        found = list_all(cluster, api, kind, namespace, **selectors)
        if kind == "Deployment" and not written:
            written.append(kind)
            server.set_status("Deployment", "eyrie-chat-r1", {"availableReplicas": 7})
            cache.invalidate("chat")
            cache.of("chat")
        return found

    monkeypatch.setattr(Cluster, "list_all", list_slowly)
    cache.sweep()
    [deployment] = [one for one in cache.of("chat") if one["kind"] == "Deployment"]
    assert deployment["status"]["availableReplicas"] == 7


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[EnginePages]:
    monkeypatch.setattr(cluster_endpoints, "_SCRAPE_TIMEOUT_S", 60.0)  # a page that is not read in time counts nothing
    with EnginePages() as made:
        yield made


def engine_pod(server: ApiServer, deployment: str, uid: str) -> None:
    """A running pod of a workload, at this machine's address."""
    pod = {"apiVersion": "v1", "kind": "Pod", **server.of("Deployment")[deployment]["spec"]["template"]}
    pod["metadata"] = {**pod["metadata"], "name": uid, "namespace": "serving"}
    server.put(f"/api/v1/namespaces/serving/pods/{uid}", pod)
    server.set_status("Pod", uid, {"podIP": "127.0.0.1", "containerStatuses": [{"ready": True, "restartCount": 0}]})


def test_requests_of_the_target_without_a_drafter_are_recorded(
        tmp_path: Path, server: ApiServer, pages: EnginePages) -> None:
    harness = Harness(tmp_path, server, {"port": pages.port})
    harness.serve_bare()
    engine_pod(server, "eyrie-chat-r1", "pod-a")
    pages.count(answered=7, generated=10)  # before the window
    settle(harness.reconciler())
    pages.count(answered=89, failed=1, generated=5400)
    settle(harness.reconciler(clock=lambda: utc_now() + timedelta(minutes=2)))
    (window,) = harness.histories.read("chat", kind="window").items
    assert (window.revision, set(window.figures)) == (1, {"requests", "tokens", "seconds"})
    assert (window.figures["requests"], window.figures["tokens"]) == (90.0, 5400.0)


def test_live_acceptance_is_watched_across_restarts_and_a_collapse_leads_back(
        tmp_path: Path, server: ApiServer, pages: EnginePages) -> None:
    harness = Harness(tmp_path, server, {"port": pages.port})
    reconciler = harness.serve_bare()
    job = harness.promoted_job(CanarySpec(shares=()))
    harness.propose(job, tau=3.0)
    settle(reconciler)
    server.run("eyrie-chat-r2")
    engine_pod(server, "eyrie-chat-r2", "pod-a")
    pages.count(rounds=1000, tokens=1000)  # before the window
    settle(reconciler)
    assert harness.chat.active_revision == 2
    pages.count(rounds=100, tokens=300)
    settle(harness.reconciler())
    assert harness.chat.active_revision == 2
    pages.count(rounds=200, tokens=210)  # 300 rounds since the window began, 1.7 tokens each: above half of 3.0
    settle(harness.reconciler())
    assert harness.chat.candidate_revision is None
    settle(reconciler)
    pages.count(rounds=1000, tokens=1010)
    settle(harness.reconciler())
    assert harness.chat.candidate_revision == 1
    assert harness.condition("RolledBack").reason == "AcceptanceCollapsed"
    server.run("eyrie-chat-r1")
    settle(reconciler)
    assert harness.chat.active_revision == 1
    assert harness.led_to == "1"
    harness.database.close()


def trial(tmp_path: Path, server: ApiServer, port: int) -> tuple[Harness, EndpointReconciler]:
    """A drafter that has been given a tenth of the requests, by a gateway."""
    server.apis = (*CORE, GATEWAY)
    gateway = {"name": "front", "hostnames": ["{endpoint}.example.org"]}
    harness = Harness(tmp_path, server, {"port": port, "gateway": gateway})
    reconciler = harness.serve_bare()
    harness.propose(harness.promoted_job(CanarySpec(shares=(0.1, 0.5), min_requests=20, max_step_s=3600)))
    settle(reconciler)
    server.run("eyrie-chat-r2")
    engine_pod(server, "eyrie-chat-r2", "pod-a")
    settle(reconciler)
    assert weights(server) == [90, 10]
    assert harness.chat.revisions[1].state == "canary"
    return harness, reconciler


def weights(server: ApiServer) -> list[int]:
    [rule] = server.of("HTTPRoute")["eyrie-chat"]["spec"]["rules"]
    return [one["weight"] for one in rule["backendRefs"]]


def test_with_a_gateway_a_trial_gets_more_as_it_answers_and_then_everything(
        tmp_path: Path, server: ApiServer, pages: EnginePages) -> None:
    harness, reconciler = trial(tmp_path, server, pages.port)
    assert harness.chat.url == "http://chat.example.org/v1"
    assert [one.url for one in harness.chat.revisions] == [
        f"http://{name}.{server.of('Service')[name]['metadata']['namespace']}.svc/v1"
        for name in ("eyrie-chat-r1-http", "eyrie-chat-r2-http")], "each by its own Service, for compared answers"
    pages.count(answered=19)
    settle(reconciler)
    assert weights(server) == [90, 10]
    pages.count(answered=1)
    settle(harness.reconciler())
    assert weights(server) == [50, 50]
    settle(reconciler)
    assert weights(server) == [50, 50]
    pages.count(answered=20)
    settle(harness.reconciler())
    assert harness.chat.active_revision == 2
    history = harness.histories.read("chat").items
    steps = [one.figures for one in history if one.kind in ("canary", "activated")]
    assert steps[-3:] == [{"share": 0.1}, {"share": 0.5, "answered": 20.0, "errors": 0.0},
                          {"answered": 20.0, "errors": 0.0}], "each entry has what the step before counted"
    assert weights(server) == [100]
    harness.database.close()


def test_failed_requests_on_trial_end_it(tmp_path: Path, server: ApiServer, pages: EnginePages) -> None:
    harness, reconciler = trial(tmp_path, server, pages.port)
    pages.count(answered=5, failed=2)
    settle(reconciler)
    assert harness.condition("RolledBack").reason == "CanaryFailed"
    assert weights(server) == [100]
    assert set(server.of("Deployment")) == {"eyrie-chat-r1"}
    harness.database.close()

"""What is seen of jobs and endpoints of an installation (`release`): phases, manifests, answers, and a diary."""

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.cluster.patience import eventually

if TYPE_CHECKING:  # needs Helm's SDK, which only those install who need it
    from tests.cluster.release import Release

LONG_S = 1200.0
"""For a whole job."""

QUESTIONS = ("Explain electricity in three sentences.", "What is 12 plus 7?", "Write a short greeting.",
             "What can you do?")


class Diary:
    """What happened, and when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, words: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {words}", flush=True)


def phase(release: "Release", job_id: str) -> str:
    found: str = release.get_json(f"/jobs/{job_id}")["status"]["phase"]
    return found


def manifest(release: "Release", job_id: str, stage: str) -> dict[str, Any]:
    """Of a finished stage, as it lies in the store."""
    path = f"/data/eyrie/jobs/{job_id}/stages/{stage}/manifest.json"
    code, text = release.execute(release.pod(release.part("s3")), ["cat", path])
    assert code == 0, text
    read: dict[str, Any] = json.loads(text)
    return read


@dataclass(frozen=True)
class Served:
    """What clients need to know of an endpoint."""

    url: str
    model: str


def serving(release: "Release", name: str, revision: int) -> Served:
    """An endpoint, once that revision serves it and its object says so."""
    def served() -> Served | None:
        found = next((one for one in release.objects("draftendpoints") if one["metadata"]["name"] == name), {})
        status = found.get("status", {})
        conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
        active = status.get("active_revision") == revision and conditions.get("Serving") == "True"
        return Served(status["url"], status["model"]) if active else None

    found = eventually(served, f"revision {revision} of {name} serves", LONG_S, every_s=1.0)
    assert isinstance(found, Served)
    return found


def chat(release: "Release", endpoint: Served, question: str = QUESTIONS[0]) -> tuple[str, float]:
    """An answer by the Service, and the seconds it took."""
    def asked() -> Any:
        answer = release.ask(f"{endpoint.url}/chat/completions", {
            "model": endpoint.model, "temperature": 0, "max_tokens": 64,
            "messages": [{"role": "user", "content": question}]})
        return answer if answer.status == 200 else None

    answer = eventually(asked, f"{endpoint.url} answers", every_s=1.0)
    return answer.body["choices"][0]["message"]["content"], answer.seconds

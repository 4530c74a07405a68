"""An endpoint declared as SGLang's, with two real engines behind a real gateway and a job whose proof recorded answers.

The engines are the embedded one, with n-gram drafts and without. They speak SGLang's protocol as far as a comparison
uses it: text and a running token count in every chunk. `tests/sglang` has the real one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import write_model
from eyrie_api.contract.comparison import ANSWERS_FILE, RecordedAnswer, RecordedAnswers
from eyrie_api.contract.engine import DraftTreeShape, EngineKind, EngineSpec
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord, Share
from eyrie_workers.engines.process import EngineCommand, start_engine
from tests.api.samples import finish_stage, job_spec
from tests.pipelines.rehearsal.rehearsal_stage import ENVIRONMENT, load_report
from tests.workers.engines.request_fields import Served, behind_gateway

NGRAM = Setting(method="ngram", tree=DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=8))
PROMPT = "Explain electricity in three sentences."


@dataclass(frozen=True)
class Engines:
    """Both engines, and the gateway's directory."""

    drafting_url: str
    plain_url: str
    served: Served
    gateway_dir: Path

    @property
    def url(self) -> str:
        """The endpoint's base URL."""
        return f"{str(self.served.client.base_url).rstrip('/')}/v1"

    def route(self, *, canary: bool) -> None:
        """Revision 2 drafts: it serves all requests or, as a canary, one of five next to revision 1."""
        both = {"revision": 1, "url": self.plain_url, "others": (Share(revision=2, url=self.drafting_url, share=0.2),)}
        alone = {"revision": 2, "url": self.drafting_url}
        write_model(self.gateway_dir / ROUTE_FILE, RouteRecord.model_validate(
            (both if canary else alone) | {"since": datetime.now(UTC)}))

    def answer(self, prompt: str, max_tokens: int) -> RecordedAnswer:
        """The answer without a drafter, as a proof records it."""
        found = self.served.asked(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens)
        return RecordedAnswer(prompt=prompt, text=found["choices"][0]["message"]["content"],
                              num_tokens=found["usage"]["completion_tokens"],
                              is_cut=found["choices"][0]["finish_reason"] == "length")


@contextmanager
def two_engines(directory: Path) -> Iterator[Engines]:
    """Both engines behind a gateway."""
    started = []
    try:
        for name, setting in (("drafting", NGRAM), ("plain", OFF)):
            (directory / name).mkdir()
            started.append(start_engine(EngineCommand(target="quickstart", model="quickstart", threads=1,
                                                      max_concurrency=2, use=DrafterUse(setting=setting)),
                                        directory / name))
        drafting, plain = (engine.wait_ready(120) for engine in started)
        with behind_gateway(drafting, "quickstart", directory / "gateway") as served:
            yield Engines(drafting, plain, served, directory / "gateway")
    finally:
        for engine in started:
            engine.stop()


def add_sglang_endpoint(settings: Settings, database: Database, url: str, answers: tuple[RecordedAnswer, ...] | None, *,
                        canary: bool = False, engine: EngineKind = "sglang", project: str | None = None,
                        urls: dict[int, str] | None = None) -> str:
    """Endpoint `default`: revision 1 without a drafter, revision 2 with one, which serves or is the canary. Its job's
    proof, in `engine`, recorded `answers`. `urls`: of the revisions alone. Returns the job's id."""
    job = Jobs(database).submit(derive(job_spec()))
    report = ProveReport(checkpoint="c", path="/d", engine=engine, use=DrafterUse(setting=NGRAM), seconds=1.0,
                         environment=ENVIRONMENT, load=load_report((1, 4), ("off", "candidate"), 1.9))
    files: dict[str, Any] = {"report.json": json.dumps({}).encode()}
    if answers is not None:
        files[ANSWERS_FILE] = RecordedAnswers(answers=answers).model_dump_json().encode()
    finish_stage(settings.stage_dir(job.id, "prove", ""), "prove", report, files, job.id)
    endpoints = Endpoints(database)
    endpoints.create("default", TargetSpec(model="quickstart"),
                     EndpointServeSpec(engine=EngineSpec(kind="sglang")), "quickstart", project)
    endpoints.activate("default", 1, url)
    endpoints.propose("default", job_id=job.id, checkpoint="c", use=DrafterUse(setting=NGRAM), reason="proven")
    if canary:
        endpoints.canary("default", 2, 0.2, urls=urls)
    else:
        endpoints.activate("default", 2)
    return job.id

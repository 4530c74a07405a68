"""Answers without a drafter that the proof of an endpoint's drafter recorded, from the files of its job."""

from dataclasses import dataclass

from eyrie_api.artifacts.directories import StageManifest
from eyrie_api.errors import ArtifactMissing
from eyrie_api.http.compared_answers import live_revisions
from eyrie_api.http.control import Control
from eyrie_api.http.job_files import JobFiles
from eyrie_api.v1alpha1.comparison import ANSWERS_FILE, RecordedAnswer, RecordedAnswers, RecordedRun
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.status import Endpoint


@dataclass(frozen=True)
class Recording:
    """What one proof recorded."""

    job_id: str
    answers: tuple[RecordedAnswer, ...]
    tokens_per_s: float | None
    """See `RecordedRun`."""

    def run(self, prompt: str) -> RecordedRun | None:
        """In place of the undrafted run; None for a prompt that was not asked."""
        found = next((one for one in self.answers if one.prompt == prompt), None)
        return None if found is None else RecordedRun(
            run="undrafted", job_id=self.job_id, text=found.text, num_tokens=found.num_tokens, is_cut=found.is_cut,
            tokens_per_s=self.tokens_per_s)


def read_recording(control: Control, endpoint: Endpoint) -> Recording | None:
    """Of the newest drafter that serves now; None of the embedded engine, which leaves its drafter out on request, and
    where no proof in the serving engine recorded answers. Raises StoreUnavailable, ArtifactCorrupt."""
    engine = control.endpoints.serving(endpoint.name).serve.engine.kind
    if engine == "embedded":
        return None
    for revision in sorted(live_revisions(endpoint), key=lambda one: -one.number):
        for one in control.files.manifests(revision.job_id) if revision.job_id else ():
            report = one.manifest.report
            if isinstance(report, ProveReport) and report.engine == engine:
                answers = _read(control.files, one)
                if answers is not None:
                    return Recording(one.manifest.job_id, answers.answers, undrafted_speed(report))
    return None


def _read(files: JobFiles, one: StageManifest) -> RecordedAnswers | None:
    """The recorded answers of a finished proof; None of one without any, or whose files were removed."""
    entry = next((entry for entry in one.manifest.files if entry.path == ANSWERS_FILE), None)
    if entry is None:
        return None
    try:
        path = files.path(one, entry)
        content = path.read_bytes() if path is not None else b"".join(files.pieces(one, entry))
    except ArtifactMissing:
        return None
    return RecordedAnswers.model_validate_json(content)


def undrafted_speed(report: ProveReport) -> float | None:
    """Tokens per second of one user without a drafter, from the first token on; None where it was not measured."""
    levels = () if report.load is None else report.load.levels
    gaps = (one.total.inter_token_s for one in levels if (one.variant, one.mode, one.level) == ("off", "closed", 1.0))
    return next((1.0 / gap.mean for gap in gaps if gap is not None and gap.mean > 0), None)

"""Answers that an earlier job has generated, taken over where they are what would be generated again (`reuse: auto`).

The key of an answer is a digest of what it is a function of, and is stored with its row:

    target (config, weights, tokenizer, template), dtype, engine, and the model's name at an endpoint
    the request: messages after normalization, tools, template variables, and the token ids that they render to here
    sampling parameters, token limit, seed

Source, line, file order and the other rows do not act on an answer, and neither does the address of an endpoint.

The seed is part of the key, because it decides which sample of the target's distribution a row gets. It is derived from
`regenerate.seed` and the row's id, which is a hash of messages and tools (with `turns: all`, also of the turn's number)
and does not depend on the position in a source. A reused answer is therefore the sample that would have been drawn, and
a data set of reused answers has the distribution of a generated one: requests that a job samples separately have
different seeds and keep different samples, and another `regenerate.seed` draws new ones. A greedy answer does not
depend on the seed, and neither does its key.

"The same" is up to an engine's arithmetic: engines that batch do not promise equal bits for equal requests. A failed
prompt has no answer and is asked again.

An earlier job's directory is read while that job may be deleted. Its file is opened once, compared with its manifest,
and read through the open file, or by ranges where it is in an artifact store; each row has a checksum, and one that has
changed since is generated again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eyrie_api.artifacts import MANIFEST, digest_file, read_manifest
from eyrie_api.contract.model import Digest
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, Conflict
from eyrie_workers.data.rows import META, ROWS, AnsweredRow, RowSampling, located_rows, read_meta
from eyrie_workers.jsonl_ledger import Extent, decode_line
from eyrie_workers.regeneration.answers import GenerationRequest
from eyrie_workers.stored_files import open_binary

_HINT = "generate the answers again"


def answer_key(generator: Sequence[str | None], request: GenerationRequest, sampling: RowSampling) -> str:
    """128 bits of a hash over what one answer is a function of (see the module's docstring).

    generator   digest of the target, dtype, engine, and the model's name where an endpoint is asked by name
    """
    drawn = None if sampling.temperature == 0.0 else [sampling.top_p, sampling.top_k, request.seed]
    inputs = [json.dumps(generator), request.messages, request.tools, request.chat_template_kwargs, request.prompt_ids,
              sampling.max_new_tokens, sampling.temperature, drawn]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class EarlierAnswers:
    """The answers of one earlier job, by key. Holds positions in memory, about 250 bytes a row, not rows."""

    job_id: str
    _file: BinaryIO
    _places: dict[str, Extent]

    def find(self, key: str) -> AnsweredRow | None:
        """The answer of that key; None where the job has none, or it cannot be read any more."""
        if key not in self._places:
            return None
        offset, length = self._places[key]
        try:
            self._file.seek(offset)
            return decode_line(self._file.read(length), AnsweredRow)
        except (ValueError, OSError, ArtifactMissing, ArtifactCorrupt):
            return None


@contextmanager
def earlier_answers(directory: Path, target: Digest, pause: Callable[[], None]) -> Iterator[EarlierAnswers]:
    """Open the output directory of an earlier job's regenerate stage.

    target   digest of the target whose answers are wanted
    pause    called for every row

    Raises ArtifactMissing when the directory or a file cannot be read, ArtifactCorrupt when a file differs from its
    manifest, Conflict when the answers are of another target.
    """
    with ExitStack() as opened:
        try:
            manifest = read_manifest(directory / MANIFEST)
            digests = {entry.path: entry.sha256 for entry in manifest.files}
            if digest_file(directory / META) != digests.get(META):
                raise ArtifactCorrupt(f"{directory / META} differs from the digest in its manifest", _HINT)
            meta = read_meta(directory)
            if meta is None or meta.target_digest != target:
                raise Conflict(f"the answers in {directory} are of another target", _HINT)
            file = opened.enter_context(open_binary(directory / ROWS))
            places = dict[str, Extent]()
            for extent, row in located_rows(file, directory / ROWS, digests.get(ROWS, ""), _HINT):
                pause()
                if row.key:
                    places[row.key] = extent
        except OSError as error:
            raise ArtifactMissing(f"{error.filename or directory / ROWS} cannot be read: {error.strerror}",
                                  _HINT) from error
        yield EarlierAnswers(manifest.job_id, file, places)

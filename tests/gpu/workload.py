"""What the tests and the benchmark of a GPU compute, at any of the sizes: drafters, training steps, captured rows."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

import torch

from eyrie_api.artifacts import read_manifest
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.reports import CaptureReport
from eyrie_api.contract.stages import CaptureStage
from eyrie_api.contract.targets import Dtype, TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.data.rows import META, ROWS, AnsweredRow, RowSampling, RowsMeta
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.capture import capture
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import target_digest
from eyrie_workers.training.objective import StepContext
from tests.gpu.sizes import Sizes

AUX_LAYERS, STEPS = (1, 2, 3), 3


def drafter_of(name: str, target: Path, sizes: Sizes) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """A drafter of random weights for a target, and the layers that it reads."""
    drafter, layers = _drafter_of(name, target, sizes)
    return deepcopy(drafter), layers


@lru_cache(maxsize=1)  # to make one of real sizes takes up to a minute
def _drafter_of(name: str, target: Path, sizes: Sizes) -> tuple[torch.nn.Module, tuple[int, ...]]:
    family, config = family_named(name), read_config(target)
    layers = family.layers(AUX_LAYERS, config.num_layers)
    vocab = config.vocab_size
    ids = torch.arange(vocab) if family.row.whole_vocabulary else torch.arange(sizes.draft_vocab) * (
        vocab // sizes.draft_vocab)
    spec = DrafterSpec.model_validate({"family": name, "max_draft_tokens": STEPS})
    drafter = family.create(spec, config, read_target_embeddings(target, config.tie_word_embeddings), layers,
                            DraftVocabulary(ids, vocab), 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return drafter, layers


def documents_of(sizes: Sizes, num_layers: int) -> PackedBatch:
    """Random states; the second half of each document is its answer."""
    generator, lengths = torch.Generator().manual_seed(3), sizes.lengths(sizes.step_tokens)
    total = sum(lengths)
    return PackedBatch(
        torch.randint(sizes.vocab, (total,), generator=generator),
        torch.cat([torch.arange(length) >= length // 2 for length in lengths]),
        torch.randn(total, num_layers, sizes.hidden, generator=generator),
        torch.randn(total, sizes.hidden, generator=generator), lengths)


def step(name: str, target: Path, sizes: Sizes, device: torch.device,
         dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one training step, in float32 on the device."""
    drafter, layers = drafter_of(name, target, sizes)
    drafter.to(device)
    embeddings = read_target_embeddings(target, read_config(target).tie_word_embeddings, device)
    with device_scope(device):
        objective = family_named(name).objective(
            drafter, embeddings, TrainSpec(ttt_length=STEPS, unrolled_fraction=0.5, single_step_ratio=0.0),
            sizes.step_tokens, dtype)
    outcome = objective(documents_of(sizes, len(layers)), StepContext(9, 10, 0))
    torch.autograd.backward(outcome.loss)
    gradients = {key: parameter.grad.float() for key, parameter in drafter.named_parameters()
                 if parameter.grad is not None}
    return float(outcome.loss.detach()), gradients


def write_rows(directory: Path, target: Path, sizes: Sizes, lengths: tuple[int, ...]) -> None:
    """What the stage before capture leaves, with random tokens."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, sizes.vocab, (length,), generator=generator).tolist() for length in lengths]
    rows = [AnsweredRow(id=f"{number:032x}", source="s", line=number + 1, category="", seed=0, text="",
                        finish_reason="length", ids_exact=True, prompt_ids=row[: len(row) // 2],
                        answer_ids=row[len(row) // 2:],
                        sampling=RowSampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=9))
            for number, row in enumerate(ids)]
    (directory / ROWS).write_text("".join(row.model_dump_json() + "\n" for row in rows))
    meta = RowsMeta(target_digest=target_digest(target), answers_digest="sha256:" + "0" * 64)
    (directory / META).write_text(meta.model_dump_json())


def run_capture(out: Path, target: Path, rows: Path, sizes: Sizes, dtype: Dtype = "float32",
                **fields: object) -> CaptureReport:
    """Run the capture stage with the target in `dtype`; `fields` are those of CaptureSpec."""
    out.mkdir()
    spec = CaptureStage(job_id="job", target=TargetSpec(model=str(target), dtype=dtype), rows_dir=str(rows),
                        capture=CaptureSpec.model_validate({
                            "check_rows": 0, "aux_layers": AUX_LAYERS, "max_length": sizes.context,
                            "batch_tokens": sizes.kernel_tokens, **fields}))
    (out / "spec.json").write_text(spec.model_dump_json())
    code = run_program(CaptureStage, capture, ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])
    if code:
        raise RuntimeError(f"capture ended with {code}: {(out / 'failure.json').read_text()}")
    report = read_manifest(out).report
    assert isinstance(report, CaptureReport)
    return report

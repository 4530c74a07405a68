"""The drafter card: provenance and results of a drafter, as `eyrie-card.json` and README.md in its directory.

A drafter is useful with its own target only: with another revision, tokenizer or layer count the same weights load
without an error and their proposals are rejected. The card therefore identifies the target by digest, which
`drafters.check` compares. It also records the digest of the data, the settings and the code, so that the drafter can be
reproduced; it contains neither times nor paths, so that the reproduction has the same bytes.

A checkpoint is immutable and measured after it is written. Results are therefore never added to its own card:
`with_results` writes a copy of the directory (with linked weights where the file system supports it) whose card
contains them. `weights_digest` covers config and weights only and is equal for both copies: it identifies the drafter,
while the digest of the whole directory identifies the artifact. When a drafter is promoted, its final benchmark and its
proof are written next to its directory, and this command adds them to a copy for distribution:

    python -m eyrie_workers.drafters.card DIR OUT --results DIR-results.json
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from eyrie_api.artifacts import digest_file, write_atomically
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, EyrieError, InvalidInput, report_error
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import target_digest

CONFIG, WEIGHTS, CARD, README = "config.json", "model.safetensors", "eyrie-card.json", "README.md"
TOKENIZER = "tokenizer.json"


class TargetIdentity(Frozen):
    name: str
    """Hub id, or the last part of a local path; for display."""

    revision: str | None = None
    """Commit of a Hub model."""

    architecture: str
    num_layers: int = Field(ge=1)
    digest: Digest
    """Of configuration, weights, tokenizer and chat template (`targets.loading.target_digest`)."""

    tokenizer_digest: Digest | None = None
    """Of `tokenizer.json`: compared without reading the weights."""


class DataIdentity(Frozen):
    """The captured states it was trained on."""

    store_digest: Digest
    """Of the store's index, which names every shard by digest."""

    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    longest_row: int = Field(ge=0)
    """In tokens. The drafter was not trained beyond this length."""


class Card(Frozen):
    """`eyrie-card.json`."""

    format_version: Literal[1] = 1
    family: str = "eagle3"
    candidate: str | None = None
    target: TargetIdentity
    data: DataIdentity | None = None
    drafter: DrafterSpec
    init_digest: Digest | None = None
    """`weights_digest` of the drafter whose training it continued."""

    aux_layers: tuple[int, ...]
    """`hidden_states` indices."""

    train: dict[str, JsonValue] = Field(default_factory=dict)
    step: int = Field(0, ge=0)
    epoch: float = 0.0
    tokens: int = Field(0, ge=0)
    draft_vocabulary_coverage: float | None = None
    code_version: str
    results: dict[str, JsonValue] = Field(default_factory=dict)
    """Reports by kind (benchmark, tune, proof)."""


def identify(path: Path, spec: TargetSpec | None = None, *, digest: str | None = None) -> TargetIdentity:
    """The identity of the target in directory `path`. A known `digest` avoids reading the weights."""
    config = read_json(path / "config.json")
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    architectures = config.get("architectures") or ["unknown"]
    tokenizer = path / TOKENIZER
    name = path.name if spec is None or Path(spec.model).expanduser().is_dir() else spec.model  # no paths
    return TargetIdentity(
        name=name, revision=hub_revision(path), architecture=str(architectures[0]), num_layers=int(layers or 0),
        digest=digest or target_digest(path), tokenizer_digest=digest_file(tokenizer) if tokenizer.is_file() else None)


def hub_revision(path: Path) -> str | None:
    """The commit of a Hub cache directory `.../snapshots/<commit>`; None elsewhere."""
    is_commit = len(path.name) == 40 and all(character in "0123456789abcdef" for character in path.name)
    return path.name if path.parent.name == "snapshots" and is_commit else None


def write_card(directory: Path, card: Card) -> None:
    write_atomically(directory / CARD, card.model_dump_json(indent=2) + "\n")
    write_atomically(directory / README, readme(card))


def read_card(directory: Path) -> Card | None:
    """The card of a drafter; None when it has none. Raises ArtifactCorrupt when it cannot be read."""
    try:
        return Card.model_validate_json((directory / CARD).read_text())
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArtifactCorrupt(f"{directory / CARD} is not a drafter card: {str(error).splitlines()[0]}",
                              "export the drafter again, or delete the card") from error


def weights_digest(directory: Path) -> str:
    """Digest of configuration and weights; independent of card and README."""
    sha = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        sha.update(f"{name}\0{digest_file(directory / name)}\n".encode())
    return "sha256:" + sha.hexdigest()


def with_results(directory: Path, out: Path, results: dict[str, JsonValue]) -> Path:
    """A copy of the checkpoint at `out`, replacing an existing directory, with `results` added to its card. Raises
    InvalidInput for a checkpoint without a card."""
    card = read_card(directory)
    if card is None:
        raise InvalidInput(f"{directory} has no {CARD}", "export the drafter again")
    temporary = out.with_name(f".{out.name}.temporary")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(directory, temporary, copy_function=_link_or_copy)
    for name in (CARD, README):  # a link would write through to the original
        (temporary / name).unlink(missing_ok=True)
    write_card(temporary, card.model_copy(update={"results": card.results | results}))
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    return out


def _link_or_copy(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, to)


def readme(card: Card) -> str:
    """The card as Markdown, in the form of a Hugging Face model card."""
    family = FAMILIES.get(card.drafter.family)
    target, data = card.target, card.data
    where = f" at `{target.revision}`" if target.revision else ""
    layers = f"{target.architecture}, {target.num_layers} layers"
    lines = [
        "---", *(["library_name: sglang"] if family is not None and family.sglang_algorithm is not None else []),
        f"tags: [speculative-decoding, {card.family}]", f"base_model: {json.dumps(target.name)}",
        "---", "", f"# {_title(card.family)} drafter for {target.name}", "",
        f"Drafts for `{target.name}`{where} ({layers}) and for no other model: with another "
        "revision or tokenizer the weights load without an error and all drafts are rejected. Check the pair with "
        "`eyrie certify --check-only <this directory> --target <the model>`.", "",
        "| | |", "|---|---|", f"| target digest | `{target.digest}` |",
    ]
    if target.tokenizer_digest:
        lines.append(f"| tokenizer digest | `{target.tokenizer_digest}` |")
    layer_ids = ", ".join(map(str, card.aux_layers))
    lines += [f"| states read | {f'{layer_ids} (hidden_states indices, 0 = embeddings)' if layer_ids else 'none'} |",
              f"| variant | {variant(card.drafter)} |"]
    if data is not None:
        lines.append(f"| trained on | {data.tokens:,} tokens in {data.rows:,} conversations, the longest of "
                     f"{data.longest_row:,}; store `{data.store_digest}` |")
    if card.init_digest:
        lines.append(f"| continued from | a drafter with weights `{card.init_digest}` |")
    if card.step:
        lines.append(f"| training | step {card.step:,}, epoch {card.epoch:g}, {card.tokens:,} tokens seen |")
    if card.draft_vocabulary_coverage is not None:
        lines.append(f"| draft vocabulary | covers {card.draft_vocabulary_coverage:.2%} of the training answers |")
    lines += [f"| created by | Eyrie {card.code_version} |", "",
              "## Measured", "",
              *([f"- {kind}: {_summary(report)}" for kind, report in card.results.items()]
                or ["This copy contains no results."]), "",
              "All settings are in `eyrie-card.json`."]
    return "\n".join(lines) + "\n"


def variant(spec: DrafterSpec) -> str:
    flags = [name for name in ("fc_norm", "norm_before_fc", "norm_output") if getattr(spec, name)]
    if spec.sliding_window is not None:
        flags.append(f"sliding_window {spec.sliding_window}")
    return ", ".join(flags) or f"plain {_title(spec.family)}"


def _title(family: str) -> str:
    row = FAMILIES.get(family)
    return family if row is None else row.title


def _summary(value: Any) -> str:
    """Top-level scalars of a report; the JSON has all of it."""
    if not isinstance(value, dict):
        return str(value)
    scalars = [f"{key} {item:.4g}" if isinstance(item, float) else f"{key} {item}"
               for key, item in value.items() if isinstance(item, str | int | float) and item is not None]
    return ", ".join(scalars) or "see eyrie-card.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.card", description="Add measured results.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="JSON object: kind -> report")
    options = parser.parse_args(arguments)
    try:
        print(with_results(options.directory, options.out, json.loads(options.results.read_text())))
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The drafter card: where a drafter comes from and what it did, beside its weights as `eyrie-card.json` and README.md.

A drafter is worth nothing without its target: the same weights beside another revision, another tokenizer or another
layer count load without a word and accept nothing. So the card names the target by digest, and `drafters.check`
compares. It also names the data by digest, the settings, and the code, so that a drafter can be made again; it holds no
clock and no path, so that making it again gives the same bytes.

A checkpoint is immutable, and what was measured comes after it. So results never go into a checkpoint's own card:
`with_results` makes a copy of the directory (weights linked, not copied, where the file system can) whose card has
them. `weights_digest` covers config and weights alone and is the same for both: that is the drafter's identity, the
digest of the whole directory is the artifact's. When a drafter is promoted, its final benchmark and its proof are
written beside its directory, ready to be given to whoever the drafter is given to:

    python -m eyrie_workers.drafters.checkpoint.card DIR OUT --results DIR-results.json
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
from eyrie_api.errors import ArtifactCorrupt, EyrieError, InvalidInput
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.drafter import SGLANG_ALGORITHMS, DrafterSpec
from eyrie_api.v1alpha1.model import Digest, Frozen
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.drafters.eagle3.directory_format import CARD, CONFIG, README, WEIGHTS
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.loading import target_digest

TOKENIZER = "tokenizer.json"
_CALLED = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1/2", "medusa": "Medusa", "hydra": "Hydra", "standalone": "Standalone",
           "dflash": "DFlash"}
"""A family in words; one that is not here is called by its own name."""


class TargetIdentity(Frozen):
    """The one target a drafter is for."""

    name: str
    """Hub id, or the last part of a local path; for people."""

    revision: str | None = None
    """Commit of a Hub model."""

    architecture: str
    num_layers: int = Field(ge=1)
    digest: Digest
    """Of configuration, weights, tokenizer and chat template (`targets.loading.target_digest`)."""

    tokenizer_digest: Digest | None = None
    """Of `tokenizer.json`: the part that may be compared in a moment."""


class DataIdentity(Frozen):
    """The captured states it was trained on."""

    store_digest: Digest
    """Of the store's index, which names every shard by digest."""

    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    longest_row: int = Field(ge=0)
    """Tokens. Nothing is known of the drafter beyond this length."""


class Card(Frozen):
    """`eyrie-card.json`."""

    format_version: Literal[1] = 1
    family: str = "eagle3"
    candidate: str | None = None
    target: TargetIdentity
    data: DataIdentity | None = None
    drafter: DrafterSpec
    aux_layers: tuple[int, ...]
    """`hidden_states` indices."""

    train: dict[str, JsonValue] = Field(default_factory=dict)
    step: int = Field(0, ge=0)
    epoch: float = 0.0
    tokens: int = Field(0, ge=0)
    draft_vocabulary_coverage: float | None = None
    code_version: str
    results: dict[str, JsonValue] = Field(default_factory=dict)
    """What was measured, by kind (benchmark, tune, proof): the reports themselves."""


def identify(path: Path, spec: TargetSpec | None = None, *, digest: str | None = None) -> TargetIdentity:
    """The identity of the target in directory `path`. `digest` saves reading its weights when it is known."""
    config = read_json(path / "config.json")
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    architectures = config.get("architectures") or ["unknown"]
    tokenizer = path / TOKENIZER
    name = path.name if spec is None or Path(spec.model).expanduser().is_dir() else spec.model
    return TargetIdentity(
        name=name, revision=hub_revision(path), architecture=str(architectures[0]), num_layers=int(layers or 0),
        digest=digest or target_digest(path), tokenizer_digest=digest_file(tokenizer) if tokenizer.is_file() else None)


def hub_revision(path: Path) -> str | None:
    """The commit of a Hub cache directory `.../snapshots/<commit>`; None elsewhere."""
    is_commit = len(path.name) == 40 and all(character in "0123456789abcdef" for character in path.name)
    return path.name if path.parent.name == "snapshots" and is_commit else None


def write_card(directory: Path, card: Card) -> None:
    """Write the card and the README made from it."""
    write_atomically(directory / CARD, card.model_dump_json(indent=2) + "\n")
    write_atomically(directory / README, readme(card))


def read_card(directory: Path) -> Card | None:
    """The card of a drafter; None without one. Raises ArtifactCorrupt when it cannot be read."""
    try:
        return Card.model_validate_json((directory / CARD).read_text())
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ArtifactCorrupt(f"{directory / CARD} is no drafter card: {str(error).splitlines()[0]}",
                              "export the drafter again, or delete the card") from error


def weights_digest(directory: Path) -> str:
    """Digest of configuration and weights: what a drafter is, whatever is written about it."""
    sha = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        sha.update(f"{name}\0{digest_file(directory / name)}\n".encode())
    return "sha256:" + sha.hexdigest()


def with_results(directory: Path, out: Path, results: dict[str, JsonValue]) -> Path:
    """A copy of the checkpoint at `out`, replacing what is there, whose card has `results` added to its own.

    Raises InvalidInput for a checkpoint without a card.
    """
    card = read_card(directory)
    if card is None:
        raise InvalidInput(f"{directory} has no {CARD}", "export the drafter again")
    aside = out.with_name(f".{out.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(directory, aside, copy_function=_link_or_copy)
    for name in (CARD, README):  # a link would write through to the original
        (aside / name).unlink(missing_ok=True)
    write_card(aside, card.model_copy(update={"results": card.results | results}))
    shutil.rmtree(out, ignore_errors=True)
    os.replace(aside, out)
    return out


def _link_or_copy(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, to)


def readme(card: Card) -> str:
    """The card for people, in the form of a model card."""
    target, data = card.target, card.data
    where = f" at `{target.revision}`" if target.revision else ""
    layers = f"{target.architecture}, {target.num_layers} layers"
    lines = [
        "---", *(["library_name: sglang"] if card.drafter.family in SGLANG_ALGORITHMS else []),
        f"tags: [speculative-decoding, {card.family}]", f"base_model: {json.dumps(target.name)}",
        "---", "", f"# {_CALLED.get(card.family, card.family)} drafter for {target.name}", "",
        f"Drafts for `{target.name}`{where} ({layers}) and for no other model: the same weights beside another "
        "revision or tokenizer load silently and accept nothing. Check the pair with "
        "`eyrie check-drafter <this directory> --target <the model>`.", "",
        "| | |", "|---|---|", f"| target digest | `{target.digest}` |",
    ]
    if target.tokenizer_digest:
        lines.append(f"| tokenizer digest | `{target.tokenizer_digest}` |")
    read = ", ".join(map(str, card.aux_layers))
    lines += [f"| states read | {f'{read} (hidden_states indices, 0 = embeddings)' if read else 'none'} |",
              f"| variant | {variant(card.drafter)} |"]
    if data is not None:
        lines.append(f"| trained on | {data.tokens:,} tokens in {data.rows:,} conversations, the longest of "
                     f"{data.longest_row:,}; store `{data.store_digest}` |")
    if card.step:
        lines.append(f"| training | step {card.step:,}, epoch {card.epoch:g}, {card.tokens:,} tokens seen |")
    if card.draft_vocabulary_coverage is not None:
        lines.append(f"| draft vocabulary | covers {card.draft_vocabulary_coverage:.2%} of the training answers |")
    lines += [f"| made by | Eyrie {card.code_version} |", "",
              "## Measured", "", *(_results(card.results) or ["Nothing measured is recorded in this copy."]), "",
              "All settings are in `eyrie-card.json`."]
    return "\n".join(lines) + "\n"


def variant(spec: DrafterSpec) -> str:
    """The flags of a drafter in words."""
    flags = [name for name in ("fc_norm", "norm_before_fc", "norm_output") if getattr(spec, name)]
    if spec.sliding_window is not None:
        flags.append(f"sliding_window {spec.sliding_window}")
    return ", ".join(flags) or f"plain {_CALLED.get(spec.family, spec.family)}"


def _results(results: dict[str, JsonValue]) -> list[str]:
    return [f"- {kind}: {_brief(report)}" for kind, report in results.items()]


def _brief(value: Any) -> str:
    """Scalars of a report, one level deep; the whole of it stays in the JSON."""
    if not isinstance(value, dict):
        return str(value)
    told = [f"{key} {item:.4g}" if isinstance(item, float) else f"{key} {item}"
            for key, item in value.items() if isinstance(item, str | int | float) and item is not None]
    return ", ".join(told) or "see eyrie-card.json"


def main(arguments: list[str] | None = None) -> int:
    """The command line in the module's essay."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.checkpoint.card",
                                     description="Add measured results.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="JSON object: kind -> report")
    given = parser.parse_args(arguments)
    try:
        print(with_results(given.directory, given.out, json.loads(given.results.read_text())))
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The seed's job at the size of two processor cores: docs/examples/olmo-3.1-32b.yaml with an overlay laid over it.

`rehearsal.yaml` says which fields are replaced, and `rehearsal-short.yaml` makes the job smaller still. The target is a
small Olmo 3 (benchmarks.quickstart). Conversations are those of the quickstart corpus, written in the
forms in which Dolci and a support desk publish theirs (`published`, `write_sources`).
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from benchmarks.quickstart.corpus.streams import conversations
from eyrie_api.contract.job import JobSpec

ROOT = Path(__file__).parents[2]
SEED = ROOT / "docs" / "examples" / "olmo-3.1-32b.yaml"
OVERLAY, SHORT = Path(__file__).with_name("rehearsal.yaml"), Path(__file__).with_name("rehearsal-short.yaml")
BUCKET = "datasets"
STREAM = 7
"""Of the corpus. The target was trained on stream 0."""


def laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced: as Helm lays values over values."""
    merged = dict(under)
    for name, value in over.items():
        known = merged.get(name)
        merged[name] = laid_over(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return merged


def seed_job(target: Path, *, short: bool) -> tuple[dict[str, Any], list[str]]:
    """The job to post, and one line for each field in which it differs from the seed's file."""
    seed = yaml.safe_load(SEED.read_text())
    job = laid_over(seed, yaml.safe_load(OVERLAY.read_text()))
    if short:
        job = laid_over(job, yaml.safe_load(SHORT.read_text()))
    job["target"]["model"] = str(target)
    for source, path in zip(job["data"]["sources"], source_paths(), strict=True):
        source["path"] = path
    JobSpec.model_validate_json(json.dumps(job))
    return job, list(differences(yaml.safe_load(SEED.read_text()), job))


def source_paths() -> tuple[str, ...]:
    """Of the seed's three sources, in its order. The last is the seed's own."""
    return f"s3://{BUCKET}/think/*.parquet", f"s3://{BUCKET}/instruct/*.parquet", f"s3://{BUCKET}/support/*.jsonl.gz"


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """One line for each field that differs, by its dotted path."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from differences(before.get(name), after.get(name), f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {json.dumps(before)} -> {json.dumps(after)}"


def published(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the corpus as Dolci publishes it: tools as `functions` of a system turn, calls as `function_calls` in
    Python's syntax, results by `environment`, and every turn with the same four keys."""
    messages = [dict(message) for message in row["messages"]]
    if row.get("tools") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": None})
    turns = []
    for message in messages:
        calls = message.get("tool_calls")
        turns.append({"role": "environment" if message["role"] == "tool" else message["role"],
                      "content": message.get("content"), "functions": None,
                      "function_calls": "\n".join(map(_call, calls)) if calls else None})
    if row.get("tools"):
        turns[0]["functions"] = json.dumps([tool["function"] for tool in row["tools"]])
    return {"messages": turns, "source_dataset": row["category"]}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def write_sources(bucket: Path, num: int) -> dict[str, int]:
    """Write the three sources into the directory of a bucket: two of parquet in Dolci's form, one of JSON lines in
    OpenAI's. `num` rows in all, in the shares 2, 1, 1. Returns how many rows of each have tools."""
    rows = conversations(num, STREAM)
    tools: dict[str, int] = {}
    for name, size in (("think", num // 2), ("instruct", num // 4), ("support", num // 4)):
        folder = bucket / name
        folder.mkdir(parents=True)
        part = list(islice(rows, size))
        tools[name] = sum("tools" in row for row in part)
        if name == "support":
            with gzip.open(folder / "part-0.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in part)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([published(row) for row in part]),
                                        folder / "part-0.parquet")
    return tools

"""The ledger keeps every complete entry through a kill and never mixes entries of two specs."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.errors import ArtifactCorrupt
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.variants import Entry, Sample

SAMPLE = Sample(token_ids=(1, 2), seconds=1.0, cpu_seconds=1.0, ttft_s=0.1, rounds=1, accepted_histogram=(0, 1))


def entry(number: int) -> Entry:
    return Entry(suite="s", prompt_id=f"p\u2028{number}", temperature=0.0, repeat=0, samples={"baseline": SAMPLE})


def test_what_was_appended_is_there_when_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    first = JsonlLedger(path, Entry, "spec-a")
    for number in range(3):
        first.append(entry(number))
    assert JsonlLedger(path, Entry, "spec-a").entries == [entry(n) for n in range(3)]


@settings(deadline=None)  # it writes files
@given(cut=st.integers(1, 400))
def test_a_file_cut_anywhere_yields_a_prefix_of_its_entries_and_takes_more(
        tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("ledger") / "cells.jsonl"
    whole = JsonlLedger(path, Entry, "a")
    for number in range(3):
        whole.append(entry(number))
    written, data = whole.entries, path.read_bytes()
    path.write_bytes(data[: len(data) - min(cut, len(data))])
    again = JsonlLedger(path, Entry, "a")
    assert again.entries == written[: len(again.entries)]
    again.append(entry(9))
    assert JsonlLedger(path, Entry, "a").entries == again.entries


def test_a_ledger_of_another_spec_is_set_aside_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    JsonlLedger(path, Entry, "a").append(entry(0))
    other = JsonlLedger(path, Entry, "b")
    assert other.entries == []
    assert other.set_aside is not None
    assert other.set_aside.exists()


def test_a_whole_line_that_is_no_entry_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    JsonlLedger(path, Entry, "a").append(entry(0))
    with path.open("a") as file:
        file.write('{"suite": 3}\n')
    with pytest.raises(ArtifactCorrupt, match="line 3"):
        JsonlLedger(path, Entry, "a")


@settings(deadline=None)
@given(bit=st.integers(0, 10_000))
def test_a_flipped_bit_anywhere_in_a_finished_line_is_an_error(
        tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    path = tmp_path_factory.mktemp("ledger") / "cells.jsonl"
    JsonlLedger(path, Entry).append(entry(0))
    data = bytearray(path.read_bytes())
    bit %= 8 * (len(data) - 1)  # without its newline the line is that of a killed program
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match=r"cells\.jsonl, line 1 is not an entry"):
        JsonlLedger(path, Entry)


def test_lines_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(entry(0).model_dump_json() + "\n")
    ledger = JsonlLedger(path, Entry)
    ledger.append(entry(1))
    assert JsonlLedger(path, Entry).entries == [entry(0), entry(1)]

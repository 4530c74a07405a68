"""Free ports and log tails: what every starter of a server process shares."""

import socket
from pathlib import Path

import pytest

from eyrie_api.processes import free_port, last_lines, log_lines


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_a_host_of_another_machine_has_no_free_port_here() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")


def test_a_log_tail_is_its_last_lines_without_blank_ones_and_without_the_phrases_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\n  three\nfour\nSystemExit: 1\n")
    assert last_lines(log) == "three | four | SystemExit: 1"
    assert last_lines(log, num=2, without=("SystemExit",)) == "three | four"


def test_colours_and_other_control_sequences_are_no_part_of_a_quoted_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\x1b[2m2026\x1b[0m \x1b[31;1mERROR\x1b[0m \x1b]0;title\x07broken\x00\n\x1b[2K\n")
    assert last_lines(log) == "2026 ERROR broken"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_log_without_a_line_has_no_output(text: str, tmp_path: Path) -> None:
    assert last_lines(tmp_path / "missing") == "no output"
    (tmp_path / "log").write_text(text)
    assert last_lines(tmp_path / "log") == "no output"


def test_only_the_end_of_a_large_log_is_read_and_long_lines_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("early\n" + "x" * 1_000_000 + "\nlate\n")
    lines = log_lines(log)
    assert [len(line) for line in lines] == [300, 4]
    assert lines[1] == "late"

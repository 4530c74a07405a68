"""Data in buckets and on web servers, read where the stage runs: real servers, nothing copied to disk."""

import contextlib
import gzip
import io
import ipaddress
import json
import os
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pyarrow import parquet

from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.conversation import Conversation
from eyrie_api.errors import EyrieError, InvalidInput, Transient
from eyrie_api.ssrf_safe_http import WebFile, open_at_any_place
from eyrie_workers.data.overlap import BenchmarkPrompts
from eyrie_workers.data.readers import check_source, read_conversations
from eyrie_workers.data.suites import excluded_prompts, load_suite
from eyrie_workers.regeneration import selection
from eyrie_workers.targets.templates import ChatTokenizer
from tests.api.artifacts.conftest import Bucket, make_bucket
from tests.tiny import tiny_target

ROWS = [{"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": "A number."}]}
        for n in range(300)]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_parquet(rows: list[Any]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def as_zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


FORMS = {"a.jsonl": lines(ROWS), "a.json": json.dumps(ROWS).encode(), "a.jsonl.gz": gzip.compress(lines(ROWS)),
         "a.jsonl.zst": as_zstd(lines(ROWS)), "a.parquet": as_parquet(ROWS)}


def questions(path: str, **fields: Any) -> list[str]:
    found = list(read_conversations(DataSource(path=path, **fields)))
    assert all(isinstance(one, Conversation) for one in found)
    return [one.prompt[-1]["content"] for one in found]  # type: ignore[union-attr, misc]


EXPECTED = [f"What is {n}?" for n in range(300)]


@pytest.fixture(params=["rclone", "moto"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = make_bucket(request.getfixturevalue(f"{request.param}_s3"), tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", made.server.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(made.secret))
    monkeypatch.setenv("EYRIE_ARTIFACTS_MAX_ATTEMPTS", "1")
    return made


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_file_is_read_from_a_bucket(name: str, bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=f"chats/{name}", Body=FORMS[name])
    assert questions(f"s3://{bucket.name}/chats/{name}") == EXPECTED


@pytest.mark.parametrize("name", FORMS)
def test_a_suite_in_a_bucket_is_measured_and_kept_out_of_training(name: str, bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=f"suites/{name}", Body=FORMS[name])
    suite = SuiteSpec(name="s", path=f"s3://{bucket.name}/suites/{name}")
    assert {prompt.messages[0]["content"] for prompt in load_suite(suite)} == set(EXPECTED)
    assert [messages[0]["content"] for messages in excluded_prompts([suite.path], pytest.fail)] == EXPECTED


def test_a_suite_that_is_not_in_its_bucket_or_is_damaged_is_named(bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="cut.jsonl.gz", Body=FORMS["a.jsonl.gz"][:-20])
    for name, says in (("none.jsonl", "is not there"), ("none.parquet", "is not there"),
                       ("cut.jsonl.gz", "cannot be read")):
        path = f"s3://{bucket.name}/{name}"
        with pytest.raises(InvalidInput, match=f"{path}.*{says}"):
            load_suite(SuiteSpec(name="s", path=path))
        with pytest.raises(InvalidInput, match=f"{path}.*{says}"):
            list(excluded_prompts([path], pytest.fail))


def test_a_prefix_and_a_pattern_name_the_objects_directly_below(bucket: Bucket) -> None:
    for key, rows in (("c/2.jsonl", ROWS[100:]), ("c/1.jsonl", ROWS[:100]), ("c/notes.txt", []),
                      ("c/old/0.jsonl", ROWS)):
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=lines(rows) or b"no data")
    assert questions(f"s3://{bucket.name}/c") == EXPECTED
    assert questions(f"s3://{bucket.name}/c/") == EXPECTED
    assert questions(f"s3://{bucket.name}/c/*2.jsonl") == EXPECTED[100:]
    assert questions(f"s3://{bucket.name}/c/1.jsonl", max_rows=7) == EXPECTED[:7]


@pytest.mark.parametrize("path", ["s3://{bucket}/nothing", "s3://{bucket}/c/*.parquet", "s3://no-such-bucket/c"])
def test_what_is_not_there_is_refused_before_any_work(path: str, bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="c/1.jsonl", Body=lines(ROWS))
    path = path.format(bucket=bucket.name)
    with pytest.raises(InvalidInput, match=r"names no object|is not there") as caught:
        check_source(DataSource(path=path))
    assert path in caught.value.message


def test_damaged_bytes_name_the_object(bucket: Bucket) -> None:
    bucket.client.put_object(Bucket=bucket.name, Key="c/1.jsonl.gz", Body=FORMS["a.jsonl.gz"][:-20])
    with pytest.raises(InvalidInput, match=r"c/1\.jsonl\.gz cannot be read"):
        questions(f"s3://{bucket.name}/c/1.jsonl.gz")


def test_wrong_credentials_are_an_error_to_correct_and_are_not_repeated_in_it(
        rclone_s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_bucket(rclone_s3, tmp_path)
    made.client.put_object(Bucket=made.name, Key="1.jsonl", Body=lines(ROWS))
    (made.secret / "secret_key").write_text("not-the-secret")
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", made.server.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(made.secret))
    with pytest.raises(InvalidInput, match="may not be read") as caught:
        questions(f"s3://{made.name}/1.jsonl")
    assert "not-the-secret" not in caught.value.message + caught.value.hint


def test_a_store_that_does_not_answer_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("EYRIE_ARTIFACTS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(Transient, match="cannot be read now"):
        questions("s3://bucket/1.jsonl")


def test_an_object_that_vanishes_between_listing_and_reading_ends_the_selection_and_leaves_no_part_of_it(
        bucket: Bucket, tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl"):
        bucket.client.put_object(Bucket=bucket.name, Key=f"c/{name}", Body=lines(ROWS))
    rules = selection.Rules(DataSpec(sources=(DataSource(path=f"s3://{bucket.name}/c"),), held_out_fraction=0.0),
                            BenchmarkPrompts.of([]), 100)
    work = tmp_path / "work"
    work.mkdir()
    tokenizer = ChatTokenizer(tiny_target(tmp_path / "target"))

    def select(progress: Callable[[int], None]) -> selection.SelectionSummary:
        return selection.select(work, rules, tokenizer, lambda: None, progress)

    def remove(_read: int) -> None:
        bucket.client.delete_object(Bucket=bucket.name, Key="c/2.jsonl")

    with pytest.raises(InvalidInput, match=r"/c/2\.jsonl' is not there"):
        select(remove)
    assert not list(work.iterdir())
    # Retried, the stage lists again and answers what there is.
    assert select(lambda _: None).rows_selected == 300


def test_valid_credentials_without_permission_for_an_object_are_an_error_that_names_it(
        moto_s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_bucket(moto_s3, tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", made.server.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(made.secret))
    made.client.put_object(Bucket=made.name, Key="c/1.jsonl", Body=lines(ROWS))
    path = f"s3://{made.name}/c/1.jsonl"
    assert questions(path) == EXPECTED
    made.client.put_bucket_policy(Bucket=made.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [{
        "Effect": "Deny", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{made.name}/*"}]}))
    with pytest.raises(InvalidInput, match=re.escape(path) + ".*may not be read") as caught:
        questions(path)
    assert "s3:GetObject" in caught.value.hint


# A web server


def certificate(directory: Path) -> Path:
    """A certificate of 127.0.0.1 and data.internal and its key, in one file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "t")])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(1).not_valid_before(datetime.now(UTC) - timedelta(days=1))
            .not_valid_after(datetime.now(UTC) + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                                                         x509.DNSName("data.internal")]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .sign(key, hashes.SHA256()))
    path = directory / "server.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class _Ranges(_Quiet):
    """Answers ranges of a file's bytes."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            super().do_GET()
            return
        data, first = Path(self.translate_path(self.path)).read_bytes(), int(asked[1])
        part = data[first:int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@pytest.fixture(params=[_Quiet])
def web(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """Address, directory and certificate of a server with TLS. It answers no ranges, unless the test asks for that."""
    files, pem = tmp_path / "files", certificate(tmp_path)
    files.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(request.param, directory=str(files)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", files, pem
    server.shutdown()
    server.server_close()


_READ = """
import sys
from eyrie_api.errors import EyrieError
from eyrie_api.contract.data import DataSource
from eyrie_workers.data.readers import read_conversations
for path in sys.argv[1:]:
    try:
        print(len([one.prompt for one in read_conversations(DataSource(path=path))]))
    except EyrieError as error:
        print(error.reason, error.message)
"""


def test_files_of_a_web_server_are_streamed_and_what_is_not_there_is_named(web: tuple[str, Path, Path]) -> None:
    address, files, pem = web
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json"):
        (files / name).write_bytes(FORMS[name])
    done = subprocess.run(
        [sys.executable, "-c", _READ, *(f"{address}/{name}" for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst",
                                                                          "a.json", "none.jsonl"))],
        env=os.environ | {"SSL_CERT_FILE": str(pem)}, capture_output=True, text=True, check=True, timeout=120)
    *counts, refused = done.stdout.splitlines()
    assert counts == ["300"] * 4
    assert refused.startswith("InvalidInput")
    assert f"{address}/none.jsonl" in refused


@pytest.mark.parametrize(("web", "says"), [(_Ranges, "300"), (_Quiet, "InvalidInput")], indirect=["web"])
def test_parquet_of_a_web_server_is_read_where_it_answers_ranges(web: tuple[str, Path, Path], says: str) -> None:
    address, files, pem = web
    # Larger than a block of the client, so that it cannot have it whole by accident.
    rows = [{**row, "noise": os.urandom(30_000)} for row in ROWS]
    (files / "a.parquet").write_bytes(as_parquet(rows))
    done = subprocess.run([sys.executable, "-c", _READ, f"{address}/a.parquet"],
                          env=os.environ | {"SSL_CERT_FILE": str(pem)}, capture_output=True, text=True, check=True,
                          timeout=120)
    assert done.stdout.startswith(says)
    assert says == "300" or "a.parquet" in done.stdout


def test_a_certificate_that_is_not_trusted_is_not_ignored(web: tuple[str, Path, Path]) -> None:
    address, files, _ = web
    (files / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    with pytest.raises(EyrieError, match=r"a\.jsonl"):
        questions(f"{address}/a.jsonl")


RULES = ReadRules(home="/nowhere")
"""Of a project's job: public addresses alone."""


@pytest.fixture
def trusted(web: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Address and directory of the server with TLS, whose certificate is trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(web[2]))
    return web[:2]


class _Redirects(_Ranges):
    """Answers `/to/...` with a redirect to what follows, `/down/NAME` to the same file by plain http elsewhere, and
    `/cut/NAME` with half of the file."""

    elsewhere = ""

    def do_GET(self) -> None:
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if kind in ("to", "down"):
            self.send_response(302)
            self.send_header("Location", f"{self.elsewhere}/{rest}" if kind == "down" else f"/{rest}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "cut":
            data = Path(self.translate_path(f"/{rest}")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:len(data) // 2])
            self.close_connection = True
        else:
            super().do_GET()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Address of a server on loopback without TLS, and what was requested of it."""
    asked: list[str] = []

    class Answers(_Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    (inside / "a.parquet").write_bytes(FORMS["a.parquet"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Answers, directory=str(inside)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("web", [_Redirects], indirect=True)
def test_a_redirect_to_another_server_or_scheme_is_not_followed(
        trusted: tuple[str, Path], plain: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    address, files = trusted
    (files / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    other = "https://localhost:" + address.rpartition(":")[2]
    for elsewhere in (plain[0], address.replace("https", "http"), other, address[:-1] + ("1" if address[-1] != "1" else
                                                                                         "2")):
        monkeypatch.setattr(_Redirects, "elsewhere", elsewhere)
        for name in ("a.jsonl", "a.parquet"):
            with pytest.raises(InvalidInput, match="another host, port or scheme is not followed"):
                questions(f"{address}/down/{name}")
    assert plain[1] == []
    assert questions(f"{address}/to/a.jsonl") == EXPECTED, "another path of the same server"
    with pytest.raises(InvalidInput, match="redirects more than"):
        questions(f"{address}/to/to/to/to/to/to/to/a.jsonl")


@pytest.mark.parametrize("web", [_Redirects], indirect=True)
def test_a_file_whose_connection_ends_early_is_not_half_a_file(trusted: tuple[str, Path]) -> None:
    address, files = trusted
    (files / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    with pytest.raises(Transient, match="bytes before the file"):
        questions(f"{address}/cut/a.jsonl")


@pytest.mark.parametrize("web", [_Ranges], indirect=True)
def test_a_projects_job_reads_no_private_address_unless_an_administrator_allows_it(trusted: tuple[str, Path]) -> None:
    address, files = trusted
    open_ = RULES.model_copy(update={"allow_private": True})
    named = RULES.model_copy(update={"private_hosts": ("127.0.0.1",)})
    for name in ("a.jsonl", "a.parquet"):
        (files / name).write_bytes(FORMS[name])
        source = DataSource(path=f"{address}/{name}")
        with pytest.raises(InvalidInput, match="not public"):
            list(read_conversations(source, RULES))
        with pytest.raises(InvalidInput, match="not public"):
            load_suite(SuiteSpec(name="s", path=source.path), rules=RULES)
        for rules in (None, open_, named):
            assert len(list(read_conversations(source, rules))) == 300


@pytest.mark.parametrize("web", [_Ranges], indirect=True)
def test_the_address_that_was_checked_is_the_one_connected_to(trusted: tuple[str, Path]) -> None:
    address, files = trusted
    (files / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    (files / "b.jsonl").write_bytes(b"x" * (6 << 20))
    answers = ["127.0.0.1", "169.254.169.254"]
    open_ = RULES.model_copy(update={"allow_private": True})

    def two_faced(_host: str, _port: int) -> list[str]:
        return [answers.pop(0)]

    with WebFile(f"{address}/a.jsonl", open_, timeout_s=5.0, resolve=two_faced) as file:
        assert io.BufferedReader(file).read() == FORMS["a.jsonl"]
    with pytest.raises(InvalidInput, match="not public"):
        WebFile(f"{address}/a.jsonl", open_, timeout_s=5.0, resolve=two_faced)
    with pytest.raises(InvalidInput, match="not public"):
        WebFile(f"{address}/a.jsonl", RULES, timeout_s=5.0, resolve=lambda *_: ["93.184.215.14", "10.0.0.1"])
    with WebFile(f"{address}/a.jsonl", open_, timeout_s=5.0, resolve=lambda *_: ["127.0.0.9", "127.0.0.1"]) as file:
        assert file.read(2) == b'{"', "of several addresses the first that answers"
    # Each range is a request of its own, and a connection of its own to a checked address.
    answers[:] = ["127.0.0.1", "169.254.169.254"]
    file_at = open_at_any_place(f"{address}/b.jsonl", open_, timeout_s=5.0, resolve=two_faced)
    with pytest.raises(InvalidInput, match="not public"):
        file_at.read(1)


class _Proxy(socketserver.StreamRequestHandler):
    """Forwards the tunnels of `me:sesame` to one port, whatever host they name."""

    port, asked = 0, list[str]()

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.rfile.readline()
        self.asked.append(head.decode())
        if b"Basic bWU6c2VzYW1l" not in head:
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with socket.create_connection(("127.0.0.1", self.port)) as beyond:
            threading.Thread(target=self._back, args=(beyond,), daemon=True).start()
            while data := self.connection.recv(65536):
                beyond.sendall(data)

    def _back(self, beyond: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := beyond.recv(65536):
                self.connection.sendall(data)


def test_a_proxy_of_the_environment_is_used_and_does_not_lead_to_private_addresses(
        trusted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, files = trusted
    (files / "a.jsonl").write_bytes(FORMS["a.jsonl"])
    port = int(address.rpartition(":")[2])
    monkeypatch.setattr(_Proxy, "port", port)
    monkeypatch.setattr(_Proxy, "asked", [])
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Proxy) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{proxy.server_address[1]}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:sesame@{where}")
        source = DataSource(path=f"https://data.internal:{port}/a.jsonl")
        assert len(list(read_conversations(source, RULES))) == 300
        assert _Proxy.asked[0].startswith(f"CONNECT data.internal:{port} ")
        with pytest.raises(InvalidInput, match="not public"):
            list(read_conversations(DataSource(path="https://10.0.0.1/a.jsonl"), RULES))
        assert len(_Proxy.asked) == 1
        monkeypatch.setenv("HTTPS_PROXY", f"http://{where}")
        with pytest.raises(Transient, match="407"):
            list(read_conversations(source, RULES))
        monkeypatch.setenv("HTTPS_PROXY", f"socks5://{where}")
        with pytest.raises(InvalidInput, match="HTTPS_PROXY names a proxy with the scheme socks5"):
            list(read_conversations(source, RULES))
        proxy.shutdown()


def test_names_with_spaces_and_letters_of_other_alphabets_are_requested_as_they_are(
        trusted: tuple[str, Path]) -> None:
    address, files = trusted
    (files / "zwei W\u00f6rter + 100%.jsonl").write_bytes(FORMS["a.jsonl"])
    assert questions(f"{address}/zwei W\u00f6rter + 100%25.jsonl") == EXPECTED


@pytest.mark.parametrize("path", [
    "https://host/a.jsonl?X-Amz-Signature=abc", "https://user:secret@host/a.jsonl", "http://host/a.jsonl",
    "ftp://host/a", "s3://", "https://host"])
def test_urls_that_are_not_read_or_hold_credentials_are_refused_in_the_job(path: str) -> None:
    with pytest.raises(ValueError, match=r"URL|not read|followed"):
        DataSource(path=path)
    with pytest.raises(ValueError, match=r"URL|not read|followed"):
        SuiteSpec(name="s", path=path)

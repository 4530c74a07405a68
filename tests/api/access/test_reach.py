"""A job may not fetch by its spec what no route would show its submitter."""

from pathlib import Path
from typing import Any

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_api.planning.spec_policy import check
from eyrie_api.settings import Settings
from tests.api.samples import job_spec


def reaches(home: Path, **changes: Any) -> None:
    settings = Settings(home=home, credential_hosts="OPENAI_API_KEY=api.openai.com, TEAM_API_KEY=10.0.0.5",
                        data_buckets="open, shared/team-a/")
    mine = {("jobs", "job-mine"), ("endpoints", "mine")}
    check(job_spec(**changes), settings, lambda kind, name: (kind, name) in mine)


def source(path: object) -> dict[str, Any]:
    return {"sources": [{"path": str(path)}]}


def regenerate(**changes: Any) -> dict[str, Any]:
    return {"engine": "openai", "base_url": "http://10.0.0.5/v1", "served_model": "m"} | changes


def test_files_of_another_project_and_of_the_system_are_out_of_reach(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "jobs" / "job-theirs").mkdir(parents=True)
    outside = tmp_path / "data"
    outside.mkdir()
    (outside / "link").symlink_to(home / "jobs" / "job-theirs")
    for path in (home / "jobs" / "job-theirs" / "x.jsonl", home / "eyrie.db", home / "token", home, tmp_path, "/",
                 home / "jobs" / "job-mine" / ".." / "job-theirs" / "x",
                 home / "endpoints" / "theirs" / "traffic.jsonl", outside / "link" / "x.jsonl",
                 "/proc/self/environ", "/etc/passwd",
                 "/var/run/secrets/kubernetes.io/serviceaccount/token"):
        with pytest.raises(InvalidInput, match=r"data\.sources\[0\]\.path"):
            reaches(home, data=source(path))
        with pytest.raises(InvalidInput, match=r"target\.model"):
            reaches(home, target={"model": str(path)})
        with pytest.raises(InvalidInput, match=r"rivals\[0\]\.path"):
            reaches(home, rivals=[str(path)])
        with pytest.raises(InvalidInput, match=r"drafter\.init_from"):
            reaches(home, drafter={"init_from": str(path)})
        with pytest.raises(InvalidInput, match=r"sweep\.axes: drafter\.init_from"):
            reaches(home, sweep={"axes": [{"field": "drafter.init_from", "values": ["org/head", str(path)]}]})
    reaches(home, drafter={"init_from": str(home / "jobs" / "job-mine" / "stages")}, rivals=["org/head"])
    reaches(home, data=source(home / "jobs" / "job-mine" / "x.jsonl"))
    reaches(home, data=source(home / "endpoints" / "mine" / "traffic.jsonl"))
    reaches(home, data=source(outside / "chats.jsonl"), target={"model": "org/name"})
    reaches(home)


def test_no_secret_of_eyrie_or_a_cloud_is_sent_to_an_endpoint_by_a_job(tmp_path: Path) -> None:
    for variable in ("EYRIE_TOKEN", "EYRIE_DATABASE_URL", "EYRIE_X_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        with pytest.raises(InvalidInput, match="api_key_env"):
            reaches(tmp_path, regenerate=regenerate(api_key_env=variable))
    for url in ("http://169.254.169.254/v1", "http://[fd00:ec2::254]/v1", "http://metadata.google.internal/v1",
                "http://2852039166/v1", "http://0xa9fea9fe/v1", "http://0251.0376.0251.0376/v1", "http://169.254.43518/v1",
                "http://[::ffff:169.254.169.254]/v1", "http://\uff11\uff16\uff19.254.169.254/v1", "http://["):
        with pytest.raises(InvalidInput, match="base_url"):
            reaches(tmp_path, regenerate=regenerate(base_url=url))


def test_a_key_of_the_server_goes_to_the_hosts_that_an_administrator_named_for_it(tmp_path: Path) -> None:
    openai = "https://API.openai.com/v1"
    reaches(tmp_path, regenerate=regenerate(api_key_env="TEAM_API_KEY"))
    reaches(tmp_path, regenerate=regenerate(api_key_env="OPENAI_API_KEY", base_url=openai))
    for url, variable in (("https://evil.example/v1", "OPENAI_API_KEY"), (openai, "TEAM_API_KEY"),
                          ("https://api.openai.com.evil.example/v1", "OPENAI_API_KEY"), (openai, "OTHER_API_KEY"),
                          ("https://api.openai.com@evil.example/v1", "OPENAI_API_KEY")):
        with pytest.raises(InvalidInput, match="base_url"):
            reaches(tmp_path, regenerate=regenerate(api_key_env=variable, base_url=url))
    with pytest.raises(InvalidInput, match=r"endpoints\[0\].*EYRIE_CREDENTIAL_HOSTS"):
        reaches(tmp_path, regenerate=regenerate(api_key_env="OPENAI_API_KEY", base_url=openai,
                                                endpoints=["https://evil.example/v1"]))


def test_jobs_of_projects_read_the_buckets_that_an_administrator_named_and_no_others(tmp_path: Path) -> None:
    def reads(path: str) -> None:
        reaches(tmp_path, data=source(path))

    for allowed in ("s3://open/chats", "s3://open", "s3://shared/team-a/x.jsonl"):
        reads(allowed)
    for url in ("s3://artifacts/jobs", "s3://shared/team-ab/x.jsonl", "s3://shared", "s3://shared/team-a/../team-b",
                "s3://opened/x"):
        with pytest.raises(InvalidInput, match=r"data\.sources\[0\]\.path.* of projects may read"):
            reads(url)
    reads("https://data.example/chats.jsonl")
    for url in ("https://169.254.169.254/latest", "https://metadata.google.internal/x", "https://2852039166/x"):
        with pytest.raises(InvalidInput, match="may not ask"):
            reads(url)

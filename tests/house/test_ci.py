"""What `.ci/run` says at the end, with stubs in place of its commands."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tests.waiting import wait_for

TIERS = ("the real SGLang's tests", "the cluster's tests and the rehearsal", "the slow tests",
         "the interpreted kernels", "the campaigns' short forms", "the console in a browser", "the chart's tests",
         "the demo from the installed wheel", "many architectures", "known vulnerabilities", "the bill of materials",
         "the documentation")
CLUSTER, SLOW = TIERS[1:3]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with `.ci/run`; all that it calls is a stub, which exits as the variable of the command's last word
    says."""
    stub = '#!/usr/bin/env bash\nname=${1:-${0##*/}}\nname=${name//-/_}\nexit "${!name:-0}"\n'
    for path in (".ci/audit", ".ci/browser", ".ci/cluster", "bin/make", "cluster/up"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(stub)
        (tmp_path / path).chmod(0o755)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    return tmp_path


def last_line(checkout: Path, **variables: str) -> tuple[int, str]:
    """Exit code and last line of a run."""
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
                   "EYRIE_CLUSTER_SCRIPTS": str(checkout / "cluster")}
    run = subprocess.run([checkout / ".ci/run"], capture_output=True, text=True, timeout=60, check=False,
                         env=environment | variables)
    assert run.stderr == ""
    return run.returncode, run.stdout.splitlines()[-1]


def test_a_run_in_which_every_tier_passed_is_complete(checkout: Path) -> None:
    code, line = last_line(checkout)
    assert code == 0
    assert line.startswith("complete: every tier passed")


def test_the_build_of_a_cluster_goes_next_to_the_tiers_and_ends_with_the_run(checkout: Path) -> None:
    build, pid = checkout / "cluster" / "build", checkout / "pid"
    build.write_text(f"#!/usr/bin/env bash\necho $$ > {pid}\nsleep 600\n")
    build.chmod(0o755)
    (checkout / "bin" / "make").write_text(f"#!/usr/bin/env bash\nuntil [ -s {pid} ]; do sleep 0.1; done\nexit 2\n")
    assert last_line(checkout)[0] == 2
    wait_for(lambda: not Path(f"/proc/{int(pid.read_text())}").exists(), "the end of the build")


@pytest.mark.parametrize(("variables", "tiers"), [
    ({"browser": "75"}, TIERS[5:6]), ({"test_slow": "75", "audit": "75"}, (SLOW, TIERS[9])),
    ({"EYRIE_CLUSTER_SCRIPTS": "nowhere"}, (CLUSTER,)),
    ({"EYRIE_CI_SECONDS": "1300"}, (CLUSTER, SLOW)), ({"EYRIE_CI_SECONDS": "0"}, TIERS)])
def test_a_run_without_some_tiers_is_incomplete_and_names_them(
        checkout: Path, variables: dict[str, str], tiers: tuple[str, ...]) -> None:
    code, line = last_line(checkout, **variables)
    assert code == 0
    assert line.startswith("incomplete: not run in ")
    assert line.partition(" s: ")[2] == "; ".join(tiers)


@pytest.mark.parametrize(("variables", "code", "failed"), [
    ({"lint": "2"}, 2, "lint and the fast tier"), ({"test_sglang": "2"}, 2, TIERS[0]),
    ({"EYRIE_CLUSTER_SCRIPTS": "nowhere", "docs": "2"}, 2, TIERS[11]), ({"test_slow": "124"}, 1, SLOW)])
def test_the_last_line_of_a_run_that_failed_names_the_tier_that_did(
        checkout: Path, variables: dict[str, str], code: int, failed: str) -> None:
    returned, line = last_line(checkout, **variables)
    assert returned == code
    assert line.startswith(f"incomplete: {failed} failed with exit code {code}, and what follows it did not run")
    assert line.endswith(CLUSTER) == ("EYRIE_CLUSTER_SCRIPTS" in variables)

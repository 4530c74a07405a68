"""Verbs that are programs of the workers: started as children, their words and exit codes are the command's."""

from eyrie_api.errors import InvalidInput
from tests.operator.conftest import Eyrie


def test_a_comparison_that_cannot_be_is_refused_with_the_hint_and_the_exit_code(eyrie: Eyrie) -> None:
    done = eyrie("compare", "--target", "my-model")
    assert done.returncode == InvalidInput.exit_code
    assert "give --data" in done.stderr
    assert done.stdout == ""

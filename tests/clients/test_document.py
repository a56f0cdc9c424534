"""docs/clients.md says what the tests see."""

from tests.clients.cases import CASES, CONTAINERDS, INCOMPLETE, render, render_incomplete
from tests.clients.document import DOCUMENT, commands, configuration, table


def test_the_matrix_is_that_of_the_tests() -> None:
    assert table("pull") == render((case.row, case.containerd, case.outcome) for case in CASES)
    assert table("containerd") == render_incomplete(INCOMPLETE)


def test_every_command_is_one_that_a_test_runs() -> None:
    assert commands() == list(dict.fromkeys(case.command for case in CASES))


def test_each_containerd_has_its_configuration() -> None:
    for containerd in CONTAINERDS:
        base, cri = configuration(containerd, cri=False), configuration(containerd, cri=True)
        assert cri.startswith(base) and len(cri) > len(base)
        assert "version =" not in cri
        for case in INCOMPLETE:
            assert case.containerd != containerd or cri.count(case.without) == 1
    assert DOCUMENT.count("```toml") == 2 * len(CONTAINERDS)

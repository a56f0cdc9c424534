"""Names made of arguments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockindex.hotset import check_workload
from snapshotter.workload.container import argv_digest
from snapshotter.workload.naming import workload_name


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/usr/bin/python3", "/app/train.py", "--lr", "1"], "python3-train-"),
        (["python", "-u", "-m", "pkg.serve"], "python-pkg.serve-"),
        (["/bin/sh", "-c", "exec /opt/run.sh --all"], "sh-exec-"),
        (["/entrypoint.sh"], "entrypoint-"),
        (["Node", "--max=1", "Server.js"], "node-server-"),
        (["a" * 50, "b" * 50], f"{'a' * 20}-{'b' * 20}-"),
        ([], ""),
        (["..", "--"], ""),
    ],
)
def test_words_for_people(argv: list[str], words: str) -> None:
    assert workload_name(argv) == words + argv_digest(argv)[7:13]


@given(st.lists(st.text()))
def test_any_arguments_give_a_name(argv: list[str]) -> None:
    check_workload(workload_name(argv))


@given(st.lists(st.text(max_size=3)), st.lists(st.text(max_size=3)))
def test_digests_tell_arguments_apart(left: list[str], right: list[str]) -> None:
    without_zeros = not any("\0" in argument for argument in (*left, *right))  # as execve has them
    assert argv_digest(left) == argv_digest(left)
    assert not without_zeros or (argv_digest(left) == argv_digest(right)) == (left == right)
    assert (workload_name(left) == workload_name(right)) or left != right

"""Numbers on command lines of the bench."""

import argparse

import pytest

from scripts.rig.arguments import positive


@pytest.mark.parametrize("text", ["0.001", "1", "999999"])
def test_a_positive_number(text: str) -> None:
    assert positive(text) == float(text)


@pytest.mark.parametrize("text", ["0", "-3", "1e6", "inf", "nan"])
def test_no_number_to_work_with(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be above 0, and below 1000000"):
        positive(text)

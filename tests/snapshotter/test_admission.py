"""Places of pulls: bounded per registry and in all, and given back."""

from contextlib import ExitStack

import pytest

from snapshotter.admission import Admission
from snapshotter.errors import Transient


def test_a_registry_fills_its_own_places_only() -> None:
    admission = Admission(per_registry=2, in_all=3)
    with ExitStack() as places:
        for _ in range(2):
            places.enter_context(admission.place("hung.example/app:1"))
        with pytest.raises(Transient, match=r"2 layers of hung\.example are being waited for already, 2 of all"):
            places.enter_context(admission.place("hung.example/other:2"))
        places.enter_context(admission.place("fine.example/app:1"))
        with pytest.raises(Transient, match=r"0 layers of third\.example .* 3 of all"):
            places.enter_context(admission.place("third.example/app:1"))
    assert repr(admission) == "<Admission {} of 2 a registry, 3 in all>"


def test_a_place_is_given_back_whatever_happens() -> None:
    admission = Admission(per_registry=1, in_all=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="it broke"), admission.place("one.example/app"):
            raise ValueError("it broke")

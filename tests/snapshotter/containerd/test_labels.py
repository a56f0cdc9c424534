"""Which layer a Prepare is about, by each family of labels."""

import pytest

from snapshotter.containerd.labels import is_layer_unpack, layer_ref, target_name
from snapshotter.errors import InvalidArgument
from snapshotter.model import LayerRef
from tests.snapshotter.containerd.fake_provider import CRI, STARGZ, TARGET, digest, layer_labels

A, B, C = digest("a"), digest("b"), digest("c")


def _cri(**changes: str) -> dict[str, str]:
    values = {"image-ref": "host:5000/a/b:1", "layer-digest": A, "image-layers": f"{A},{B},{C}"} | changes
    return {CRI + key: value for key, value in values.items()}


def test_cri_family() -> None:
    assert layer_ref(_cri()) == LayerRef("host:5000/a/b:1", A, (A, B, C))


def test_stargz_family() -> None:
    labels = {f"{STARGZ}reference": "h/a@" + B, f"{STARGZ}digest": A, f"{STARGZ}layers": f"{A},{B}"}
    assert layer_ref(labels) == LayerRef("h/a@" + B, A, (A, B))


def test_incomplete_family_gives_way_to_a_complete_one() -> None:
    labels = layer_labels("t", B) | {CRI + "image-ref": "other/x:1"}
    assert layer_ref(labels) == LayerRef("registry.test/app:1", B, (B,))


@pytest.mark.parametrize("labels", [{}, {TARGET: "sha256:x"}, {CRI + "image-ref": "h/a:1"}, {CRI + "layer-digest": A}])
def test_no_layer_named(labels: dict[str, str]) -> None:
    assert layer_ref(labels) is None


def test_siblings_begin_with_the_layer_and_drop_what_was_cut_or_repeated() -> None:
    ref = layer_ref(_cri(**{"image-layers": f"{B}, {A},{C},{B},sha256:01"}))
    assert ref is not None
    assert ref.siblings == (A, B, C)


@pytest.mark.parametrize("family", ["cri", "stargz"])
def test_a_list_that_may_have_been_cut_is_told(family: str) -> None:
    """Clients leave away what would take a label beyond 4096 bytes, key and value together."""
    image, own, above = (
        (f"{CRI}image-ref", f"{CRI}layer-digest", f"{CRI}image-layers")
        if family == "cri"
        else (f"{STARGZ}reference", f"{STARGZ}digest", f"{STARGZ}layers")
    )
    most = (4096 - len(above) + 1) // len(A + ",")

    def cut(count: int) -> bool:
        digests = [f"sha256:{number:064x}" for number in range(count)]
        ref = layer_ref({image: "h/a:1", own: digests[0], above: ",".join(digests)})
        assert ref is not None and len(ref.siblings) == count
        return ref.cut

    assert [cut(1), cut(most - 1), cut(most)] == [False, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"layer-digest": "sha256:short"},
        {"layer-digest": "sha512:" + "a" * 128},
        {"layer-digest": A.upper()},
        {"layer-digest": A + "/../../etc"},
        {"image-ref": "no-host"},
        {"image-ref": "host/with space:1"},
    ],
)
def test_unreadable_labels_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=r"label containerd\.io/snapshot/cri"):
        layer_ref(_cri(**changes))


def test_target_and_unpack_keys() -> None:
    assert target_name({TARGET: "sha256:chain"}) == "sha256:chain"
    assert target_name({}) == ""
    assert is_layer_unpack("any", {TARGET: "sha256:chain"})
    assert is_layer_unpack("default/1/extract-806891197-jyHS sha256:19e1", {})
    assert not is_layer_unpack("default/7/my-container", {})
    assert not is_layer_unpack("default/7/extract-logs", {})

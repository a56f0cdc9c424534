"""What a signature signs: an artifact's statement, a canonical text that binds the bytes to the image.

    bootseer artifact v1
    type <artifact type>
    image-key <digest>
    subject <digest of the platform's manifest, or ->
    workload <name, or ->
    blob <digest> <size> <media type> <layer, or ->        one a blob, in the manifest's order

Each line ends with a line feed. Whatever decides what a node does with an artifact is in it, so a signature holds for
no other image, kind, workload or layer. Not in it: the time of creation, and where the artifact lies; a signed artifact
may be copied, and an old one shown again. Two artifacts have equal statements only if they say the same, for no word
holds a blank.
"""

from snapshotter.artifacts.model import Artifact
from snapshotter.errors import InvalidArgument

__all__ = ["statement"]


def statement(artifact: Artifact) -> bytes:
    """See the module. InvalidArgument for an artifact with a word that is empty, or has blanks or control characters
    in it."""
    subject = artifact.subject.digest if artifact.subject is not None else "-"
    lines: list[tuple[str, ...]] = [
        ("type", artifact.kind.value),
        ("image-key", artifact.image_key),
        ("subject", subject),
        ("workload", artifact.workload or "-"),
    ]
    lines += [("blob", it.digest, str(it.size), it.media_type, it.layer or "-") for it in artifact.blobs]
    for words in lines:
        for word in words:
            if not word or not word.isascii() or not word.isprintable() or " " in word:
                raise InvalidArgument(f"the artifact's {words[0]} {word!r} cannot be signed: it is not one plain word")
    return "".join(f"{' '.join(words)}\n" for words in [("bootseer artifact v1",), *lines]).encode()

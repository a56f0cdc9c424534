"""The outside world that images come from: registries, index directories, local layouts.

HTTP and OSError end here: what comes out is a value or an error of `snapshotter.errors`. Every call is bounded by its
stated time-outs. Retries, priorities and verification of layer bytes are the fetch engine's.
"""

from snapshotter.registry.blob import BlobStream, RegistryBlob
from snapshotter.registry.client import Registry
from snapshotter.registry.indexdir import IndexDirectory
from snapshotter.registry.local import FileBlob, OciLayout
from snapshotter.registry.manifest import Descriptor, Document, Manifest, Platform, host_platform, parse_platform
from snapshotter.registry.reference import ImageRef, parse_digest, parse_reference

__all__ = [
    "BlobStream",
    "Descriptor",
    "Document",
    "FileBlob",
    "ImageRef",
    "IndexDirectory",
    "Manifest",
    "OciLayout",
    "Platform",
    "Registry",
    "RegistryBlob",
    "host_platform",
    "parse_digest",
    "parse_platform",
    "parse_reference",
]

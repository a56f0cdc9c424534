"""OCI artifacts: layer indexes and hot sets as a registry keeps them, beside the image they are of.

`model` says what an artifact is and what its manifest looks like, `finder` finds them, `publisher` brings them there.
Knows registries, and nothing of mounts, fetching or trust: who may be believed is `snapshotter.trust`'s.
"""

"""OCI artifacts: layer indexes and hot sets as a registry keeps them, beside the image they are of.

`model` says what an artifact is and what its manifest looks like, `finder` finds them, `publisher` brings them there.
`place` is the one interface over all that may keep them (`registryplace`, `ocilayout`, `directory`; `opening` tells
them apart), and `made` makes artifacts out of files. Knows registries, and nothing of mounts, fetching or trust: who
may be believed is `snapshotter.trust`'s.
"""

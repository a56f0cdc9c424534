"""The chaos bench: containers that read and checksum everything while all around them is broken, in a seeded order.

`command` is `scripts/chaos`. `site` has the network, the registry behind a `faultproxy`, and one node whose disk is
small. `containers` and `reader` read; `coldlayers` removes images and pulls them again, so that there is always
something to fetch; `disturbers` kill, upgrade, restart, fill; `record` has what happened, and `leaks` what is left.
"""

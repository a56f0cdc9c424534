"""Publishing from a node: what it has learnt of images, brought where other nodes find it, without anybody's asking.

A program of its own (`__main__`), which the fetch process starts now and then beside itself (`fetch.publishing`): TLS,
packing and a registry that hangs cost one child process and no reader. `agreement` says whether recordings are worth
it, `offers` what the node has that others may not, `state` what was done, `rounds` does it.
"""

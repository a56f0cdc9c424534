"""The FUSE block device of the node: one file a layer, read-only, spoken in the kernel's own protocol.

`abi` names the protocol's structures, `ring` the requests in flight that outlive a process, `device` the connection,
`server` the process that reads it.
"""

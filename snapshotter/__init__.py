"""The daemon: containerd service, FUSE block device, block store, fetch engine, registry client, supervisor, CLI."""

"""Workloads: which containers of an image do the same work, and which blocks that is likely to read. See `choice`."""

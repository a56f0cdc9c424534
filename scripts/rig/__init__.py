"""The test bench: real images, a registry, an emulated link, a private containerd, and cold starts over them.

It may use everything of the project; nothing of the project may use it. It drives the product through its commands
only, never through its Python API, so that what it measures is what a user gets. Everything it starts, mounts or
creates belongs to one `workspace.Workspace` and goes away with it.
"""

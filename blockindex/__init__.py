"""What blocks a layer has, where their bytes come from, which are hot.

Sans-IO: bytes and offsets in, values out. Nothing in this package opens a file, a socket or a thread, reads a clock or
knows containerd; `proto` (the generated index messages, for the codec) is all it imports from this project.
"""

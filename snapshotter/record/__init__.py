"""The recorder: what a container reads of its image, block by block, until it is ready. See `recorder`."""

"""System calls that Python's standard library does not wrap: the mount API and loop devices. One call, one function."""

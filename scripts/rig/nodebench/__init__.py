"""`scripts/bench node`: what bootseer costs on a node, beside overlayfs and ext4. Nothing is emulated.

Each module measures one thing: a function from a `Site` and a number of rounds to a plain result, which says its own
rows of the table. Systems that are compared take turns in random order within each round, and ratios are those of
pairs from one round.
"""

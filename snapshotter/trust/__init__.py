"""Who is believed: keys, signatures of artifacts, and what a node has caught lying.

`statement` is what a signature signs, `keys` makes and checks signatures, `policy` judges an artifact by them,
`quarantine` remembers packs whose bytes were refuted. Knows artifacts as values; must not know registries, fetching or
what is done with a verdict.
"""

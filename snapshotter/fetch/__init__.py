"""The fetch process: brings layers into the block store and answers the reads whose blocks were missing.

`host` decides whose bytes come first, `layer` knows what of a layer is missing and who waits, `flight` fetches spans,
`arrival` brings a new layer in, `process` ties them to the ring and to the service process.
"""

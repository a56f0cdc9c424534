"""The grid of cold starts: images x networks x systems, one JSON line a run; reports and gates over such lines."""

"""Tables and pictures of the committed measurements: `python -m benchmarks.report`."""

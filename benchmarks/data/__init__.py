"""The datasets of the benchmarks, from a local folder or from their public sources."""

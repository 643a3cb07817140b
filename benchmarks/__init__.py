"""Benchmarks and equality runs on a GPU; results of record lie in `results/`."""

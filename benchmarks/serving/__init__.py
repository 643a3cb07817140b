"""What `benchmarks/serve.py` is made of: servers, a client, workloads, and what is made of their samples."""

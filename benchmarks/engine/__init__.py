"""What `benchmarks/equality_vllm.py` is made of: schedules of requests, an engine that answers them, the comparison."""

"""What the benchmarks of whole engines are made of: requests, engines that answer them, comparisons."""

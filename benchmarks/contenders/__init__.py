"""The contenders: each module here has a tuple of them; ``benchmarks.registry`` finds them."""

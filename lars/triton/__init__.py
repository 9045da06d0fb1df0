"""LARS on CUDA with Triton: a step takes a constant number of kernel launches."""

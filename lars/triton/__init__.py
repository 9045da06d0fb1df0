"""One step of LARS on CUDA, in a constant number of kernel launches."""

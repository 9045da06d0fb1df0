"""Profiles of some steps: a trace of torch.profiler for each rank, and a page that sums them up."""

"""Tuning: measure all-reduce algorithms on the running job, fit the links, and make a plan."""

"""Measure all-reduce algorithms, fit the links, and write a plan."""

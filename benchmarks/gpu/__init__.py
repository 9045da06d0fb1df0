"""Check, measure and record every GPU path of the project in four calls of at most ten minutes.

``python -m benchmarks.gpu --help`` shows the options. Each part of a call is a module of this
package with a ``TITLE`` and a function ``run(report, place)``. tests/benchmarks/gpu/test_gpu.py
runs the same checks.
"""

"""Check, measure and record every GPU path of the project with one command.

``python -m benchmarks.gpu --help`` shows the options. Each part is a module of this package with a
``TITLE`` and a function ``run(report, place)``. tests/benchmarks/gpu/test_gpu.py runs the same
checks.
"""

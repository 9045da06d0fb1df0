"""Every GPU path of the project in one command: checked, measured and recorded.

``python -m benchmarks.gpu --help`` tells how. A part is a file here with a ``TITLE`` and a
``run(report, place)``; what it checks are functions that tests/benchmarks/gpu/test_gpu.py runs too.
"""

"""Starts coverage in each process of a test, under the name of the test.

Python imports a module of this name when it starts; this folder is on the path in
``python -m tests.mutants cover`` alone. pytest keeps the running test in an environment variable,
which a process that is forked from a server does not see: there it travels with the process.
"""

import os
from multiprocessing.process import BaseProcess

import coverage

coverage.process_startup()

TEST = "PYTEST_CURRENT_TEST"
_init, _bootstrap = BaseProcess.__init__, BaseProcess._bootstrap


def _named(self, *arguments, **options):
    _init(self, *arguments, **options)
    self.test = os.environ.get(TEST)


def _under_its_name(self, *arguments, **options):
    if self.test:
        os.environ[TEST] = self.test
    return _bootstrap(self, *arguments, **options)


BaseProcess.__init__, BaseProcess._bootstrap = _named, _under_its_name

# make demo | check | test | ci | lint | types | docs. Each makes .venv if it is not there.
PYTHON ?= python3
VENV = .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format types docs clean

demo: $(VENV)/demo
	$(VENV)/bin/largebatch data prepare digits --out data/digits
	$(VENV)/bin/largebatch train digits --nproc 2

# A venv has the compiled files of its packages; those of tests and of the product are kept too.
unexport PYTHONDONTWRITEBYTECODE

# Three at a time on two cores, as many tests wait for processes; more threads than cores would wait
# for each other. A worker without tests takes some of another's: slow ones lie next to each other.
RUN_TESTS = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 3 --dist worksteal

# `make test ORDER=7` runs the tests in the random order of that seed.
test: $(VENV)/dev
	$(RUN_TESTS) --junitxml=build/tests.xml $(if $(ORDER),--order $(ORDER))

# For everyday work, in a few minutes: without the tests that are marked slow.
.PHONY: check test-fast
check: $(VENV)/dev
	$(MAKE) -j2 test-fast lint types

test-fast: $(VENV)/dev
	$(RUN_TESTS) -m "not slow"

# What CI runs: all else beside the tests, which take longest.
.PHONY: ci
ci: $(VENV)/ci
	$(MAKE) -j2 test types docs lint test-isa

# The kernels of lars and amp as they are on a processor without AVX.
.PHONY: test-isa
ISA = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
KERNELS = $(addprefix tests/lars/test_,dialects.py fused.py masters.py) \
	$(addprefix tests/lars/muon/test_,adamw.py newton_schulz.py step.py) \
	$(addprefix tests/amp/test_,convert.py masters.py precision.py)

# With a cache of its own: torch.compile would run kernels that it kept for another ISA, which write
# out of bounds.
test-isa: $(VENV)/dev
	$(ISA) TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/build/inductor/isa" OMP_NUM_THREADS=1 \
		$(VENV)/bin/python -m pytest -q -m "not slow" $(KERNELS)

# All calls of the GPU harness on the CPU; also by DRY_PYTHON, an interpreter with torch 2.11 and
# Python 3.12, in which nothing of the project is installed.
.PHONY: gpu-dry
gpu-dry: $(VENV)/dev
	set -e; for python in $(VENV)/bin/python $(DRY_PYTHON); do \
		PYTHONPATH=src:. $$python -m benchmarks.gpu --dry; done

# With the oldest torch that is supported, in an environment of its own (6 GB).
OLDEST = torch==2.11.0 torchvision==0.26.0
.PHONY: test-oldest
test-oldest: $(VENV)-oldest/dev
	$(subst $(VENV),$(VENV)-oldest,$(RUN_TESTS)) -m "not slow" tests/lars \
		tests/amp tests/comm tests/pipeline tests/recipes/models tests/recipes/training

lint: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/dev
	$(VENV)/bin/mypy

docs: $(VENV)/docs
	$(VENV)/bin/python -m sphinx -q -E -W --keep-going docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing PyTorch, DALI and the rest into $(VENV): about 6 GB, a minute or more."
	$(PIP) -e ".[recipes,cuda13]"
	@touch $@

$(VENV)/docs: $(VENV)/demo
	$(PIP) -e ".[recipes,cuda13,docs]"
	@touch $@

$(VENV)/dev: $(VENV)/demo
	$(PIP) -e ".[recipes,cuda13,remote,dev]"
	@touch $@

# All of them at once, so that pip resolves them once. Python compiles what is imported.
$(VENV)/ci: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --no-compile -e ".[recipes,cuda13,remote,dev,docs]"
	@touch $(VENV)/demo $(VENV)/dev $(VENV)/docs $@

$(VENV)-oldest/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST) \
		-e ".[recipes,cuda13,remote,dev]"
	@touch $@

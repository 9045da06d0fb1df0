# make demo | check | test | test-isa | lint | types. Each makes .venv if it is not there.
PYTHON ?= python3
VENV = .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format types docs clean

demo: $(VENV)/demo
	$(VENV)/bin/largebatch data prepare digits --out data/digits
	$(VENV)/bin/largebatch train digits --nproc 2

# Three at a time on two cores, as many tests wait for processes; more threads than cores would wait
# for each other. A worker without tests takes some of another's: slow ones lie next to each other.
RUN_TESTS = -m pytest -n 3 --dist worksteal

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(RUN_TESTS)

# For everyday work, in a few minutes: without the tests that are marked slow.
.PHONY: check test-isa
check: lint types
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(RUN_TESTS) -m "not slow"

# The tests that compare numbers, with the kernels of other processors: a different ISA each day.
ISAS = ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
	ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2
ISA ?= $(word $(shell expr 1 + $$(date +%j) % 4),$(ISAS))
NUMERICAL = tests/lars tests/amp tests/comm/test_hook.py tests/recipes/models \
	$(addprefix tests/recipes/training/test_,ema.py evaluate.py init_from.py \
	momentum_correction.py precision.py stages.py trainer.py)

# With a cache of its own: torch.compile would run kernels that it kept for a wider ISA, or a narrower
# one, and they write out of bounds.
test-isa: $(VENV)/dev
	@echo "$(ISA)"
	$(ISA) TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/build/inductor/$(ISA)" OMP_NUM_THREADS=1 \
		$(VENV)/bin/python $(RUN_TESTS) $(NUMERICAL)

# With the oldest torch that is supported, in an environment of its own (6 GB).
OLDEST = torch==2.11.0 torchvision==0.26.0
.PHONY: test-oldest
test-oldest: $(VENV)-oldest/dev
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python $(RUN_TESTS) -m "not slow" tests/lars \
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

$(VENV)-oldest/dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST) \
		-e ".[recipes,cuda13,remote,dev]"
	@touch $@

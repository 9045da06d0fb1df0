# make demo | test | lint | types. Each makes .venv if it is not there.
PYTHON ?= python3
VENV = .venv
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format types docs clean

demo: $(VENV)/demo
	$(VENV)/bin/largebatch data prepare digits --out data/digits
	$(VENV)/bin/largebatch train digits --nproc 2

# Two at a time; more threads than cores wait for each other.
test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

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
	rm -rf $(VENV) build dist src/*.egg-info

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

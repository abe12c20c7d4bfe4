# Fresh clone, fresh machine: `make demo` and `make test` need nothing but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test slow check lint types bench clean

demo: $(STAMP)
	$(BIN)/python -m tests.demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: lint types test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info

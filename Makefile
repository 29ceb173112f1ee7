# Needs make and Python 3.11 or later, nothing else. Everything is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERL_VENV ?= .venv-verl
VERL_PIP := $(VERL_VENV)/bin/python -m pip --disable-pip-version-check
PIP := $(BIN)/python -m pip --disable-pip-version-check
PLAYBOOK ?= playbooks/kl_spike.yaml

.DEFAULT_GOAL := help
.PHONY: help setup setup-test run test bench triage-bars accept families study selftest figures clean distclean verl-env test-verl verl-table verl-resolve verl-launch verl-cluster

help:
	@echo "make setup   the environment, in $(VENV)"
	@echo "make run     set-up, then: diagnose run $(PLAYBOOK)"
	@echo "make test    set-up with the test extras, then lint, types, layers and the whole suite"
	@echo "make bench   set-up, then CPU seconds a step, seconds to build, wall time of the playbook, cost of reading a log, bars of the builder, the screen"
	@echo "make families  every MoE family: made, cut, loaded back, held to the masked original (docs/families.md)"
	@echo "make triage-bars  set-up, then what logs and triage promise, without a training run"
	@echo "make accept  set-up, then the spine's promises with real incidents (half an hour)"
	@echo "make study   set-up, then every bar of the scoring, into docs/study.md (hours; STUDY=--quick: a minute)"
	@echo "make selftest   set-up, then every fault hidden in turn, into docs/selftest.md (hours; shares make study's runs)"
	@echo "make verl-env   verl's own environment for --engine verl, in $(VERL_VENV) (about 2 GB)"
	@echo "make test-verl  both set-ups, then the tests that run real verl (minutes)"
	@echo "make verl-launch, verl-cluster  cost of the launcher; jobs on a Ray cluster started for it (minutes each)"
	@echo "make verl-table both set-ups, then docs/verl.md's comparison of the engines (an hour; goes on where it was stopped)"
	@echo "make figures  set-up, then the paper's Figures 3 and 4, into docs/figures (24 runs, a few minutes)"
	@echo "make clean   remove caches and build products; make distclean: also $(VENV)"

# Stamps make a second call instant: a target is redone only when what it was made from has changed.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11" >&2; \
		  echo "mend: make PYTHON=/path/to/a/newer/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone, so that its build (CPU, CUDA) is chosen by the machine and not by a resolver run.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	$(PIP) install --quiet -c constraints.txt torch
	@touch $@

$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.setup-test: $(VENV)/.setup
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.setup

setup-test: $(VENV)/.setup-test

run: setup
	$(BIN)/diagnose run $(PLAYBOOK)

test: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

# One bar that is missed does not keep the others from being measured.
bench: setup
	-$(BIN)/python -m bench.spine
	-$(BIN)/python -m bench.logs
	-$(BIN)/python -m bench.builder --quick
	-$(BIN)/python -m bench.tui

families: setup
	$(BIN)/python -m bench.families --out docs/families.md

# Incidents, negatives, healthy runs, the time of a triage and of reading a large log; TRIAGE="--logs DIR --runs DIR" adds
# what lies elsewhere, TRIAGE="--gb 1" makes the log as large as the bar says.
triage-bars: setup
	$(BIN)/python -m bench.triage $(TRIAGE)

accept: setup
	$(BIN)/python -m bench.accept

# Both keep their runs in build/bank and go on where they were stopped.
study: setup
	$(BIN)/python -m bench.study $(STUDY)

selftest: setup
	$(BIN)/diagnose selftest --runs build/bank --markdown docs/selftest.md

figures: setup
	$(BIN)/python -m bench.figures

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find diagnose proxy taxonomy playbooks tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VERL_VENV)

# verl's pins and ours don't agree, so verl lives beside us; torch first and alone here too.
$(VERL_VENV)/.setup: constraints-verl.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_PIP) install --quiet -c constraints-verl.txt torch
	$(VERL_PIP) install --quiet -c constraints-verl.txt verl
	$(VERL_PIP) install --quiet -c constraints-verl.txt TransferQueue pyzmq msgspec cachetools fastapi uvicorn
	@touch $@

verl-env: $(VERL_VENV)/.setup

test-verl: setup-test verl-env
	$(BIN)/python -m pytest tests/verl

# What the launcher costs beyond verl, and from verl's shards to a proxy; Ray jobs on a cluster that is really started.
verl-launch: setup-test verl-env
	$(BIN)/python -m bench.verl_launch
	$(BIN)/python -m bench.verl_launch --candidates

verl-cluster: setup-test verl-env
	$(BIN)/python -m bench.verl_cluster

# Some twenty runs of verl, kept in build/verl_table; VERL_TABLE="--seeds 2 --faults a,b" makes fewer.
verl-table: setup verl-env
	$(BIN)/python -m bench.verl_table $(VERL_TABLE)

# Slow and only about the registry: that the verl extra resolves in an empty environment, at versions that suit verl.
verl-resolve:
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip --disable-pip-version-check install --quiet --dry-run '.[verl]'

# Everything runs in $(VENV), which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
OUT ?= quickstart
HOURS ?= 1
SEED ?= 0
FUZZED ?= fuzzing.json

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

BIN := $(VENV)/bin
# The versions come from constraints.txt alone, the build backend's too: an isolated build would fetch its own.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help docs quickstart install test test-full gpu-check emulate fuzz lint audit types contracts unit format constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the Python that creates the environment, VENV=.venv where it lies"

docs: $(VENV)/.test ## build docs/ as a site that needs no network: build/docs/html/index.html
	$(BIN)/python docs/make_site.py -o build/docs

quickstart: $(VENV)/.bench ## measure, calibrate, predict and validate on this machine; OUT=quickstart
	$(BIN)/python -m paradl_bench quickstart -o $(OUT)

install: $(VENV)/.bench ## create the environment with the three commands and torch

test: lint types contracts unit ## lint, types, import contracts and tests, all but the slow ones

test-full: test ## everything: what `make test` runs, then the slow tests
	@$(BIN)/python -m pytest -m slow --collect-only >/dev/null 2>&1; \
	if [ $$? -eq 5 ]; then echo "no test is marked slow"; else $(BIN)/python -m pytest -m slow -n 4 --dist loadfile --no-loadscope-reorder; fi

# OUT names the directory here too, of its own unless it is given.
gpu-check: $(VENV)/.test ## on a machine with a GPU: its tests, then a reference calibration; OUT=gpu-check
	$(BIN)/python benchmarks/gpu/gpu_check.py -o $(if $(filter file,$(origin OUT)),gpu-check,$(OUT))

# OUT likewise.
emulate: $(VENV)/.bench ## strategies on layers that sleep, over emulated nodes, against predictions; OUT=emulation
	$(BIN)/python benchmarks/emulation/emulation.py -o $(if $(filter file,$(origin OUT)),emulation,$(OUT))

# HOURS and SEED say for how long and from where; the counts of FUZZED are gone on from.
fuzz: $(VENV)/.test ## change files, options and variables at random for HOURS=1 from SEED=0; counts in FUZZED=fuzzing.json
	$(BIN)/python benchmarks/robustness/fuzz.py --hours $(HOURS) --seed $(SEED) -o $(FUZZED)

lint: $(VENV)/.test ## ruff: rules and format; bandit: what an attacker would look for; sentences of the docs that are too long
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m bandit -q -c pyproject.toml -r paradl_bench calibrate predict
	$(BIN)/python docs/sentences.py

# Not part of lint: it asks pypi.org about each pinned version, which a mirror of packages does not answer.
audit: ## known vulnerabilities of the pinned versions; needs pypi.org
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --disable-pip-version-check -q pip-audit
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

types: $(VENV)/.test ## mypy, strict
	$(BIN)/mypy

contracts: $(VENV)/.test ## which module may import which
	$(BIN)/lint-imports --no-logo

# Tests that start ranks take the cores themselves, but wait a good part of their time: for processes to start, for each
# other, for limits to pass. Three files at a time fill that. Of the other tests each core takes neighbours, which share
# fixtures and caches.
unit: $(VENV)/.test ## the tests, all but the slow ones
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist worksteal --ignore tests/distributed
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile --no-loadscope-reorder tests/distributed

format: $(VENV)/.test ## put the code in shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

constraints: ## resolve constraints.txt anew, torch's two lines kept
	$(PYTHON) -m venv --clear $(VENV)-constraints
	grep -E '^(torch|torchvision)==' constraints.txt > $(VENV)-constraints/torch.txt
	$(VENV)-constraints/bin/python -m pip install -c $(VENV)-constraints/torch.txt 'setuptools>=77' -e '.[bench,test]'
	grep '^#' constraints.txt > $(VENV)-constraints/pinned.txt
	$(VENV)-constraints/bin/python -m pip freeze --all --exclude pip --exclude paradl > $(VENV)-constraints/frozen.txt
	sed -E 's/\+[A-Za-z0-9.]+$$//' $(VENV)-constraints/frozen.txt \
	  | grep -vE '^(nvidia-|cuda-|triton)' >> $(VENV)-constraints/pinned.txt
	mv $(VENV)-constraints/pinned.txt constraints.txt
	rm -rf $(VENV)-constraints

clean: ## remove the environment and the caches; measurements are kept
	test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV)
	rm -f predict/simulation/engine/engine_compiled*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build paradl.egg-info

# Stamps are written last, so that an interrupted install is taken up again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "ParaDL needs Python 3.11 or newer, and $(PYTHON) is %d.%d: give another one as in make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	@touch $@

# What the simulator's event loop is built of, where there is a compiler.
BUILT := setup.py predict/simulation/engine/engine_compiled.c

$(VENV)/.bench: $(VENV)/.created constraints.txt pyproject.toml $(BUILT)
	$(INSTALL) --no-build-isolation -e '.[bench]'
	@touch $@

$(VENV)/.test: $(VENV)/.created constraints.txt pyproject.toml $(BUILT)
	$(INSTALL) --no-build-isolation -e '.[bench,test]'
	@touch $@ $(VENV)/.bench

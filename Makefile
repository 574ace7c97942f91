# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv by themselves and need no Redis, root or container.

# The first interpreter that is new enough. Override with: make test PYTHON=python3.13
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Without bytecode, each test process compiles all tests anew: 20 seconds of a processor each.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Several processes, which take from each other what is left. How many: see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# What .ci/run adds to the tests of one server: the other servers, Redisson and a browser.
CONFORMANCE := --servers all --beyond-first -m "not (nightly or storm)"
# Everything but storms, which need the machine to themselves.
ALL := --servers all --hypothesis-profile full -m "not storm"
NIGHTLY := test-all packages storms fuzz soak mutations links

.PHONY: help demo test conformance coverage nightly $(NIGHTLY) weather pictures package docs lint house stubs types layers clean

help:
	@echo "make demo      deliver delayed messages between two processes, and show it"
	@echo "make test         what one server shows: three minutes (ARGS='-k name' to choose, ARGS='-n0 -s' in one process and with what they print)"
	@echo "bash .ci/run      what decides whether a change lands: 25 minutes"
	@echo "make nightly      length and chance: all that follows, to packages, one after the other; hours"
	@echo
	@echo "make test-all     every test on every server, in a browser, against Redisson, and trials at full length"
	@echo "make storms       faults at random moments under load, judged by a checker: some 20 minutes, on a machine that is quiet"
	@echo "make soak         load and faults, and what they leave behind (ARGS='--minutes 60'; 15 if you do not say)"
	@echo "make fuzz         fuzzing of codecs, records and addresses for a minute (ARGS='--seconds 600' for more), then random examples"
	@echo "make mutations    plant faults in the package, and see which tests notice them (ARGS='--only wheel' to choose)"
	@echo "make links        ask for every link to another site, and list them in docs/_build/links/output.txt"
	@echo "make packages     build wheel and sdist, and try them in fresh environments, on each Python that is found"
	@echo
	@echo "make coverage     make test, with branch coverage of the core"
	@echo "make conformance  what other servers, Redisson and a browser show, beyond make test"
	@echo "make package      build wheel and sdist, and try the wheel on one Python"
	@echo "make weather      make test five times, with processes that stop for seconds and two busy processors (ARGS='--runs 1')"
	@echo "make lint         style and formatting"
	@echo "make house        measures of wording, layers and sizes, each with its bound (ARGS='--list FIGURE' for what one counts)"
	@echo "make stubs        write the stub that shows the synchronous classes to type checkers"
	@echo "make types        mypy --strict, and pyright on the public interface"
	@echo "make layers       who may import whom"
	@echo "make docs         the documentation site, in docs/_build/html; warnings are errors"
	@echo "make demo         deliver delayed messages between two processes, and show it"
	@echo "make clean        remove the virtual environment and caches"

demo: $(VENV)/run.stamp
	@$(BIN)/python -m delayq demo $(ARGS)

test: $(VENV)/dev.stamp
	@$(PYTEST) $(ARGS)

conformance: $(VENV)/dev.stamp
	@$(PYTEST) $(CONFORMANCE) $(ARGS)

# Goes on after a step that failed, and names it at the end.
nightly: $(VENV)/dev.stamp
	@failed=""; for step in $(NIGHTLY); do \
		echo "== make $$step, at $$(date +%H:%M:%S)"; \
		$(MAKE) --no-print-directory $$step || failed="$$failed $$step"; \
	done; echo "== the end of make nightly, at $$(date +%H:%M:%S)"; \
	test -z "$$failed" || { echo "FAILED:$$failed" >&2; exit 1; }

test-all: $(VENV)/dev.stamp
	@$(PYTEST) $(ALL) $(ARGS)

storms: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest tests/faults -m storm --servers all -n 2 --dist worksteal --timeout 300 $(ARGS)

soak: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.faults.soak --minutes 15 $(ARGS)

weather: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.weather $(ARGS)

mutations: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.mutations $(ARGS)

fuzz: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group fuzz
	@$(BIN)/python -m tests.fuzz $(ARGS)
	@$(PYTEST) -m hypothesis --hypothesis-profile fuzz

package: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group packages
	@$(BIN)/python -m tests.support.packages --brief $(ARGS)

packages: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group packages
	@$(BIN)/python -m tests.support.packages $(ARGS)

pictures: $(VENV)/dev.stamp
	@$(BIN)/python -m docs.images.dashboard

docs: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# Without a network, this says so, and succeeds: a nightly run shows what it left out.
links: $(VENV)/dev.stamp
	@$(BIN)/python -c 'import urllib.request as u; u.urlopen("https://www.python.org", timeout=20)' 2>/dev/null || { \
		echo "LEFT OUT, links to other sites: there is no network"; exit 0; }; \
	$(MAKE) --no-print-directory check-links

check-links: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group docs
	@$(BIN)/python -m sphinx -b linkcheck --keep-going --quiet docs docs/_build/links

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

house: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.house $(ARGS)

stubs: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.support.stubs

types: $(VENV)/dev.stamp
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python tests/unit/tasks/test_typing.py tests/unit/test_typing.py
	@# What users get: the built package, not this directory.
	@rm -rf $(VENV)/built && $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/built .
	PYTHONPATH=$(VENV)/built $(BIN)/pyright --verifytypes delayq --ignoreexternal --pythonpath $(BIN)/python

layers: $(VENV)/dev.stamp
	$(BIN)/lint-imports

coverage: $(VENV)/dev.stamp
	@$(PYTEST) --cov --cov-report=term-missing:skip-covered --cov-fail-under=96 $(ARGS)

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "delayq needs Python 3.11 or newer, and none was found on the PATH." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON), once ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip || { \
		echo "the package index cannot be reached; check the network or pip's configuration" >&2; rm -rf $(VENV); exit 1; }

# The stamps are as new as what was installed: a changed pyproject.toml installs again.
$(VENV)/run.stamp: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --editable '.[embedded,cli]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --editable '.[embedded,cli]' --group dev
	@touch $@ $(VENV)/run.stamp

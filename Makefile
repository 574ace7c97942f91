# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv by themselves and need no Redis, root or container.

# The first interpreter that is new enough. Override with: make test PYTHON=python3.13
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Several processes, which take from each other what is left. How many: see tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# What is left out of `make test`, but for storms, which need the machine to themselves.
ALL := --servers all --hypothesis-profile full -m "not storm"

.PHONY: help demo test test-all storms soak fuzz packages docs links lint house types layers coverage clean

help:
	@echo "make demo      deliver delayed messages between two processes, and show it"
	@echo "make test      the tests, on one server (ARGS='-k name' to choose, ARGS='-n0 -s' in one process and with what they print)"
	@echo "make test-all  the tests on every server, in a browser, against Redisson, and trials at full length"
	@echo "make storms    faults at random moments under load, judged by a checker: five minutes, on a machine that is quiet"
	@echo "make soak      an hour of load and faults, and what they leave behind (ARGS='--minutes 5' for less)"
	@echo "make fuzz      fuzzing of codecs, records and addresses for a minute (ARGS='--seconds 600' for more), then random examples"
	@echo "make packages  build wheel and sdist, and try them in fresh environments, on each Python that is found"
	@echo "make docs      the documentation site, in docs/_build/html; warnings are errors"
	@echo "make links     ask for every link to another site, and list them in docs/_build/links/output.txt"
	@echo "make lint      style and formatting"
	@echo "make house     measures of wording, layers and sizes, each with its bound (ARGS='--list FIGURE' for what one counts)"
	@echo "make types     mypy --strict, and pyright on the public interface"
	@echo "make layers    who may import whom"
	@echo "make coverage  make test, with branch coverage of the core"
	@echo "make clean     remove the virtual environment and caches"

demo: $(VENV)/run.stamp
	@$(BIN)/python -m delayq demo $(ARGS)

test: $(VENV)/dev.stamp
	@$(PYTEST) $(ARGS)

test-all: $(VENV)/dev.stamp
	@$(PYTEST) $(ALL) $(ARGS)

storms: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest tests/faults -m storm --servers all -n 2 --dist worksteal --timeout 300 $(ARGS)

soak: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.faults.soak $(ARGS)

fuzz: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group fuzz
	@$(BIN)/python -m tests.fuzz $(ARGS)
	@$(PYTEST) -m hypothesis --hypothesis-profile fuzz

packages: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group packages
	@$(BIN)/python -m tests.support.packages $(ARGS)

pictures: $(VENV)/dev.stamp
	@$(BIN)/python -m docs.images.dashboard

docs: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "open docs/_build/html/index.html"

links: $(VENV)/dev.stamp
	@$(BIN)/python -m pip install --quiet --group docs
	@$(BIN)/python -m sphinx -b linkcheck --keep-going --quiet docs docs/_build/links

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

house: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.house $(ARGS)

types: $(VENV)/dev.stamp
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python tests/unit/tasks/test_typing.py tests/unit/test_typing.py
	@# What users get: the built package, not this directory.
	@rm -rf $(VENV)/built && $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/built .
	PYTHONPATH=$(VENV)/built $(BIN)/pyright --verifytypes delayq --ignoreexternal --pythonpath $(BIN)/python

layers: $(VENV)/dev.stamp
	$(BIN)/lint-imports

coverage: $(VENV)/dev.stamp
	@$(PYTEST) --cov --cov-report term-missing:skip-covered --cov-fail-under 96 $(ARGS)

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

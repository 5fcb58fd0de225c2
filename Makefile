# Each target does its own set-up: a .venv beside this file, pinned by constraints.txt, nothing global.
PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test lint clean

serve: .venv/serve.stamp  # PORT=8001 for another port
	$(BIN)/quire serve --port $(PORT)

test: .venv/test.stamp
	$(BIN)/ruff check quire tests benchmarks demo
	$(BIN)/mypy
	$(BIN)/python -m pytest

lint: .venv/test.stamp
	$(BIN)/ruff check quire tests benchmarks demo
	$(BIN)/mypy

.venv/serve.stamp: pyproject.toml constraints.txt setup.py $(wildcard csrc/cpu/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --config-settings editable_mode=compat -e '.[bench]'
	touch $@

.venv/test.stamp: .venv/serve.stamp
	$(PIP) --config-settings editable_mode=compat -e '.[bench,test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

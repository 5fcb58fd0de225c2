# Each target does its own set-up: a .venv beside this file, pinned by constraints.txt, nothing global.
PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
export PYTHON

TEST_PROCESSES ?= 3
PYTEST_OPTIONS ?=
CLIENTS := .venv-conformance/bin
EXAMPLES ?= 15
OPENAI_SCHEMA ?=
INSTALLED := pyproject.toml constraints.txt setup.py packaging/setup $(wildcard csrc/cpu/*)
NEW_ENOUGH := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; this is " + sys.version.split()[0])'

.PHONY: serve test lint conformance docs docs-version clean

serve: .venv/serve.stamp  # PORT=8001 for another port
	$(BIN)/quire serve --port $(PORT)

# A new environment has no bytecode: a collection makes that of the tests and of all they import, on the core that mypy leaves.
test: .venv/test.stamp  # TEST_PROCESSES=8 for a larger machine
	@test -e .venv/bytecode.stamp || { $(BIN)/python -m pytest -n 0 --collect-only -q; touch .venv/bytecode.stamp; } >/dev/null 2>&1 & \
		$(BIN)/ruff check quire tests benchmarks demo && $(BIN)/mypy; status=$$?; wait; exit $$status
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

lint: .venv/test.stamp
	$(BIN)/ruff check quire tests benchmarks demo
	$(BIN)/mypy

conformance: .venv/serve.stamp .venv-conformance/stamp  # 3 GB of clients in all; OPENAI_SCHEMA=FILE for OpenAI's document, EXAMPLES=200 for more
	@tests/conformance/prepare $(CLIENTS)/python $(BIN)/python
	$(CLIENTS)/python -m pytest -c tests/conformance/pytest.ini tests/conformance --server-python $(BIN)/python \
		--examples $(EXAMPLES) --openai-schema '$(OPENAI_SCHEMA)'

.venv-conformance/stamp: tests/conformance/requirements.txt tests/conformance/constraints.txt
	test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-conformance
	$(CLIENTS)/pip install --quiet --disable-pip-version-check -r tests/conformance/requirements.txt
	touch $@

.venv/serve.stamp: $(INSTALLED)
	@$(NEW_ENOUGH)
	@packaging/setup .venv bench
	@touch $@

.venv/test.stamp: $(INSTALLED)
	@$(NEW_ENOUGH)
	@packaging/setup .venv bench,test
	@touch .venv/serve.stamp $@

docs: .venv-docs/stamp  # docs/ as a site in build/site; fails at a broken link
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

docs-version: .venv-docs/stamp  # VERSION=1.2: this version's site into the branch gh-pages, which is not pushed here
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mike set-default latest

.venv-docs/stamp: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --disable-pip-version-check -c constraints.txt $$(.venv-docs/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

clean:
	rm -rf .venv .venv-conformance .venv-docs build dist *.egg-info

# Every target makes .venv by itself where it is missing or older than pyproject.toml and constraints.txt.

BIN := .venv/bin
READY := .venv/ready
PYTHONS := python3.11 python3.12 python3.13 python3.14 python3
PYTHON ?= $(shell for python in $(PYTHONS); do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.PHONY: help demo test test-long bench picture docs lint clean

help:
	@echo "make demo       an ordinary script under python and under duoka run, side by side"
	@echo "make test       lint, types, import layers, all tests but the long ones"
	@echo "make test-long  the tests that take minutes; with PROGRAMS=folder other people's programs, too; SEED=7"
	@echo "make bench      duoka beside its peers, measured in one run, and the tables in the README"
	@echo "make picture    docs/run.svg, the terminal in the README, from a real run"
	@echo "make docs       the pages of docs/ as a site, in build/site"
	@echo "make lint       what make test checks before the tests"
	@echo "make clean      remove .venv and what the tools leave"

demo: $(READY)
	$(BIN)/python tools/demo.py

test: lint  # three at a time on two cores: they wait half of their time
	$(BIN)/pytest -q -n 3

test-long: $(READY)
	$(BIN)/pytest -q -m "long and not gpu" --timeout 3600 $(if $(SEED),--seed $(SEED)) $(if $(PROGRAMS),--programs "$(PROGRAMS)")

bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	$(BIN)/python -m benchmarks --write

picture: $(READY)
	$(BIN)/python tools/picture.py

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python -o -n "$(PYTHON)" || \
		{ echo "duoka: none of $(PYTHONS) is Python 3.11 or newer with ensurepip (on Debian: python3-venv)"; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,examples]'
	@touch $@

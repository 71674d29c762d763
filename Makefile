# Every target makes its environment by itself where it is missing or older than pyproject.toml and constraints.txt:
# .venv, or beside it one for TORCH=2.15.0 and PYTHON=python3.12, with the newest or (LOWEST=1) lowest of all else.

# The first of these commands that is a Python which can make environments. That one is found is not enough: pyenv's
# are there for each version that is installed, and run if it is chosen.
first = $(shell for python in $(1); do $$python -c 'import ensurepip' 2>/dev/null && echo $$python && break; done)
PYTHONS := python3.11 python3.12 python3.13 python3.14
PYTHON ?= $(call first,$(PYTHONS))
OLDEST = $(call first,python3.10 $(PYTHONS))
NEWEST = $(call first,python3.14 python3.13 python3.12 python3.11)

VENV := .venv$(if $(TORCH),-$(TORCH)-$(notdir $(PYTHON))$(if $(LOWEST),-lowest))
BIN := $(VENV)/bin
READY := $(VENV)/ready
PINNED = -c constraints.txt -e '.[dev,docs,examples]'
# What compares numbers; test-long runs it as other processors compute, too. This one's newest is taken for what it lacks.
NUMBERS := tests/flows/test_same_result.py tests/flows/test_exact.py tests/examples tests/view tests/strategies tests/run
CHOSEN = torch==$(TORCH) $(if $(LOWEST),-c $(VENV)/lowest.txt) -e '.[dev,docs,examples]'

# The tests start hundreds of interpreters, which otherwise compile the sources again, as do pytest's processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-versions test-long gpu bench picture docs lint clean

help:
	@echo "make demo       an ordinary script under python and under duoka run, side by side"
	@echo "make test       lint, types, import layers, all tests but the long ones"
	@echo "make test TORCH=2.15.0 PYTHON=python3.12    the same tests with another torch and Python"
	@echo "make test-versions  the same with the oldest and the newest of both: hours, and 15 GB"
	@echo "make test-long  the tests that take minutes, and those of numbers as on three processors; with PROGRAMS=folder other people's programs, too; SEED=7"
	@echo "make gpu        on a machine with a GPU, better two: the tests that need one, the flows on them, and their figures"
	@echo "make bench      duoka beside its peers, measured in one run, and the tables in the README"
	@echo "make picture    the terminal and the page in the README, from real runs; needs chromium"
	@echo "make docs       the pages of docs/ as a site, in build/site"
	@echo "make lint       what make test checks before the tests"
	@echo "make clean      remove .venv and what the tools leave"

demo: $(READY)
	$(BIN)/python tools/demo.py

test: $(if $(TORCH),$(READY),lint)  # three at a time on two cores: they wait half of their time
	$(BIN)/pytest -q -n 3

test-versions:
	@echo "torch 2.10.0 with $(OLDEST), torch 2.15.0 with $(NEWEST): the oldest and the newest Python of 3.10 to 3.14 here"
	$(MAKE) test TORCH=2.10.0 PYTHON=$(OLDEST) LOWEST=1
	$(MAKE) test TORCH=2.15.0 PYTHON=$(NEWEST)

test-long: $(READY)
	for capability in default avx2 avx512; do \
		ATEN_CPU_CAPABILITY=$$capability $(BIN)/pytest -q -n 2 -m "not gpu" $(NUMBERS) || exit 1; done
	$(BIN)/pytest -q -m "long and not gpu" --timeout 3600 $(if $(SEED),--seed $(SEED)) $(if $(PROGRAMS),--programs "$(PROGRAMS)") $(if $(WORKERS),--workers $(WORKERS))

# On a machine with GPUs: tests that need one, flows on real cards in place of simulated ones, and what benchmarks measure.
# One GPU is shown as four, with NCCL between them.
gpu: SHOWN = $(shell $(BIN)/python -c 'import torch; print("-m tests.shared_card 4 $(BIN)/python" * (torch.cuda.device_count() == 1))')
gpu: $(READY)
	$(BIN)/python -c 'import torch; assert torch.accelerator.is_available(), "no GPU that torch can use: duoka doctor says why"'
	$(BIN)/pytest -q -n 1 -m gpu
	FUZZ_DEVICE=cuda $(BIN)/pytest -q -n 3 tests/fuzz/test_known.py::test_known
	$(BIN)/python $(SHOWN) -m pytest -q -n 3 -m "(cards or cpu_and_cards) and not npu" --real-cards --timeout 600 --ignore tests/flows/test_counts.py \
		tests/flows tests/examples
	$(BIN)/python -m benchmarks cuda --write

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
	rm -rf .venv .venv-* build dist src/*.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt setup.py src/duoka/view/dispatch/_replay.c
	@test -x $(BIN)/python -o -n "$(call first,$(PYTHON))" || \
		{ echo "make: $(if $(PYTHON),$(PYTHON) does not run,none of $(PYTHONS) runs) here, or has no ensurepip" \
		"(on Debian: install python3-venv; with pyenv: pyenv shell). PYTHON=… takes another;" \
		"what runs here: $(or $(strip $(foreach one,python3.10 $(PYTHONS),$(call first,$(one)))),nothing from 3.10 to 3.14)"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(if $(LOWEST),$(BIN)/python tools/lowest.py >$(VENV)/lowest.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH),$(CHOSEN),$(PINNED))
	@touch $@

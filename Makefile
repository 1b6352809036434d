# Two commands for a newcomer: `make demo` and `make test`. Each installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
# The pins are for Python 3.11; on newer Pythons pip resolves the newest releases.
PINS := $(shell $(PYTHON) -c "import sys; print('-c constraints/py311-cpu.txt' * (sys.version_info[:2] == (3, 11)))")
PARALLEL = -n auto --maxprocesses 4 --dist worksteal
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS)

.PHONY: demo test lint env nano clean

demo: .venv/.demo  ## listen to a recording composed on the spot; writes out/demo
	$(BIN)/ai-jax demo

test: .venv/.test  ## run the tests
	$(BIN)/python -m pytest $(PARALLEL)

lint: .venv/.env  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

env: .venv/.env  ## everything a developer needs

# The nano model from its material (see README): train, choose the threshold, measure, package.
nano: .venv/.env
	$(BIN)/ai-jax train configs/train/nano.yaml --material $(MATERIAL) --out runs/nano --export out/nano
	$(BIN)/python scripts/nano_package.py out/nano $(MATERIAL)

clean:  ## remove what was installed and built
	rm -rf .venv .venv-new build dist out *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.demo: $(BIN)/python pyproject.toml
	$(INSTALL) -e .
	@touch $@

.venv/.test: $(BIN)/python pyproject.toml constraints/py311-cpu.txt
	$(INSTALL) -e ".[test,torch]"
	@touch $@ .venv/.demo

.venv/.env: $(BIN)/python pyproject.toml constraints/py311-cpu.txt
	$(INSTALL) -e ".[dev]"
	@touch $@ .venv/.demo .venv/.test

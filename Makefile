# `make demo` and `make test` work from a fresh clone with Python >= 3.10 and make; everything lands in .venv.
PYTHON ?= python3
BIN := .venv/bin
DEMO ?= demo.mp4
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint clean

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/telefuser generate "a red circle moving right on a black background" -o $(DEMO) --overwrite

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2

clean:
	rm -rf .venv build *.egg-info

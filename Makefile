# `make demo` and `make test` need Python 3.11 or newer and, to compile models, a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/npusim demo

# Two files of tests at a time; PyTorch's own threads would only get in their way.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "npusim needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: EXTRAS := torch,cli,llm
$(VENV)/test.stamp: EXTRAS := torch,llm,test
$(VENV)/lint.stamp: EXTRAS := torch,llm,test,dev

$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing npusim[$(EXTRAS)] into $(VENV)"
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

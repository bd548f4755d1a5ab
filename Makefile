# `make demo`, `make test` and `make bench` need Python 3.11 or newer and, to compile models, a C++ compiler.
PYTHON ?= python3
VENV := .venv
BENCH := .venv-bench
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check -qq

.PHONY: demo test test-metal lint pages docs lock wheel clean bench bench-calls bench-cpu bench-llm bench-gguf bench-coverage bench-partitioned bench-quantised

demo: $(VENV)/demo.stamp
	$(BIN)/npusim demo

# Two files of tests at a time, in the order of their names: the last ones are short, so that both processes end at about
# the same time. PyTorch's own threads would only get in their way. The tests start many processes, which need the
# bytecode of PyTorch: PYTHONDONTWRITEBYTECODE would make each of them compile it again.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What concerns Apple GPUs: tests and, on a Mac, figures beside other engines, in benchmarks/results/metal-<chip>.json.
# On a Mac the conformance samples run on its GPU, elsewhere in the emulator, and no figure is measured.
test-metal: $(VENV)/metal.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m metal
	$(BIN)/python benchmarks/metal.py $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of the documentation that scripts write, in both languages.
pages: $(VENV)/test.stamp
	$(BIN)/npusim ops --markdown > docs/operators.md
	$(BIN)/npusim doctor --markdown > docs/environment.md
	$(BIN)/python benchmarks/coverage.py --table
	$(BIN)/python tools/rewrites_table.py
	$(BIN)/python tools/korean_pages.py

# The documentation in site/, in English and Korean; `mkdocs serve` shows it while you write.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A wheel and an sdist in dist/; the wheel, which is made from the sdist, is tried in an empty environment.
wheel: $(VENV)/dev.stamp
	rm -rf dist .venv-wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP) install -c constraints.txt dist/*.whl
	.venv-wheel/bin/python -I tools/smoke.py

# New pins for all extras, for pip and for uv; newer versions: ARGS=--upgrade.
lock: $(VENV)/dev.stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/lock.py $(ARGS)

# Each benchmark alone: make bench-calls, bench-cpu, bench-llm, bench-gguf, bench-coverage; a short form of it: ARGS=--quick.
# What is left to the host costs how much: make bench-partitioned. An 8-bit ResNet: make bench-quantised.
bench: bench-calls bench-cpu bench-llm bench-gguf bench-coverage

.NOTPARALLEL:

bench-calls bench-cpu bench-coverage bench-partitioned bench-quantised: bench-%: $(BENCH)/bench.stamp
	$(BENCH)/bin/python benchmarks/$*.py $(ARGS)

bench-llm: $(BENCH)/llm.stamp .venv-export/stamp
	$(BENCH)/bin/python benchmarks/llm_cpu.py $(ARGS)

bench-gguf: $(BENCH)/llm.stamp
	$(BENCH)/bin/python benchmarks/llm_gguf.py $(ARGS)

clean:
	rm -rf $(VENV) $(BENCH) .venv-export .venv-wheel .demo .bench build dist site

$(BIN)/python $(BENCH)/bin/python .venv-export/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "npusim needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $*

$(VENV)/demo.stamp: EXTRAS := torch,cli,llm
$(VENV)/test.stamp: EXTRAS := torch,llm,cli,test,docs
$(VENV)/metal.stamp: EXTRAS := torch,llm,cli,test,docs,metal
$(VENV)/docs.stamp: EXTRAS := docs
$(VENV)/dev.stamp: EXTRAS := dev

$(BENCH)/bench.stamp: EXTRAS := torch,llm,bench
$(BENCH)/llm.stamp: EXTRAS := torch,llm,bench,bench-llm

# Python compiles the modules that it imports. pip would compile all of them, PyTorch's included, for half a minute.
INSTALL = @echo "installing npusim[$(EXTRAS)] into $(@D)" && \
  $(@D)/bin/python $(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS)]' && touch $@

$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL)

$(BENCH)/%.stamp: pyproject.toml constraints.txt | $(BENCH)/bin/python
	$(INSTALL)

# What exports OpenVINO's language models needs an older transformers than the one that the project is tested with.
.venv-export/stamp: benchmarks/export.txt | .venv-export/bin/python
	@echo "installing $< into $(@D)"
	$(@D)/bin/python $(PIP) install -r $<
	@# optimum-intel requires torchvision, whose build may not fit that of torch; exporting language models works without
	$(@D)/bin/python $(PIP) uninstall -y torchvision
	@touch $@

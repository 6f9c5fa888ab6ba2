PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup test test-without-compiler lint demo bench wheel docs notebooks
help:
	@echo "make demo   train six networks on synthetic rooms and compare them: ten minutes, or MINUTES=3"
	@echo "make test   set up .venv if needed and run the tests, then some again without a compiler"
	@echo "make lint   ruff, mypy and the direction of imports"
	@echo "make bench  what the layers cost on this machine, as a table and bench.json"
	@echo "make docs   the site, in site/"
	@echo "make wheel  the source distribution and the wheels, in dist/"

setup: $(VENV)/.ready

# Reinstalled only when pyproject.toml changes: sources are installed in editable mode.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Layers, conversion, training and documents once more as on a machine without a compiler. Not repeated: exported
# graphs, which never hold the operators, and what is about processes and signals, whoever computes in them.
WITHOUT_COMPILER := tests/without_compiler.py tests/test_documents.py tests/test_precision.py tests/test_runtimes.py \
	$(wildcard tests/test_layers*.py tests/models/test_convert*.py tests/training/test_lo*.py) \
	tests/ops/test_depth_conv2d.py tests/ops/test_scaled_assign.py
REPEATED := not export and not onnx and not killed and not signal and not ctrl_c

test: setup
	$(BIN)/python -m pytest -n auto -m "not slow"
	$(MAKE) test-without-compiler

test-without-compiler: setup
	CXX=/nonexistent $(BIN)/python -m pytest -n auto -m "not slow" -k "$(REPEATED)" $(WITHOUT_COMPILER)

lint: setup
	$(BIN)/ruff check src tests examples benchmarks docs studies hatch_build.py
	$(BIN)/ruff format --check src tests examples benchmarks docs studies hatch_build.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

# As many steps as fit into the minutes on two cores, two networks at a time. Stopped, the same command goes on.
# Memory that a step frees is kept for the next one: giving it back to the system and asking again is a quarter of a step.
MINUTES ?= 10
demo: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000
demo: setup
	$(BIN)/malleable study studies/demo/study.yaml --steps $$($(BIN)/python -c "print(max(10, round(100 * $(MINUTES))))") \
		--jobs 2 --out runs/demo/$(MINUTES)min --report runs/demo/report.html

bench: setup
	$(BIN)/malleable bench --out bench.json --overwrite

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/python docs/site.py
	$(BIN)/zensical build --strict --clean

# The source distribution, the wheel for everyone, and one for each machine of KERNELS that carries compiled kernels.
# aarch64 needs Debian's g++-aarch64-linux-gnu, or leave it out: make wheel KERNELS=x86_64
KERNELS ?= x86_64 aarch64
wheel: setup
	rm -rf build/wheel
	$(BIN)/python -m build
	set -e; for machine in $(KERNELS); do \
		MALLEABLE_KERNELS=$$machine $(BIN)/python -m build --wheel --outdir build/wheel; \
		PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*-linux_$$machine.whl; \
	done

notebooks: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/jupytext --to ipynb examples/notebooks/*.py
	$(BIN)/jupytext --output examples/notebooks/teacher_and_student.ipynb examples/teacher_and_student.py

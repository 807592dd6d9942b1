# `make demo` and `make test` need python3 (>= 3.11), make and a network for pip; all else goes into $(VENV).
PYTHON ?= python3
VENV   ?= .venv
TESTS  ?= tests

python := $(VENV)/bin/python
ready  := $(VENV)/.ready

.PHONY: demo test bench kernels gpu lint format clean

demo: $(ready)
	$(python) examples/digits.py

# two workers: most of the time goes into compiling, and the simulated devices take cores of their own; a process of Triton's
# interpreter cannot compile, so the tests of kernels are a run of their own
test: $(ready)
	$(if $(filter-out tests/kernels%,$(TESTS)),$(python) -m pytest -n 2 $(filter-out tests/kernels%,$(TESTS)))
	$(if $(filter tests tests/kernels%,$(TESTS)),TRITON_INTERPRET=1 $(python) -m pytest -n 2 $(or $(filter tests/kernels%,$(TESTS)),tests/kernels))

bench: $(ready)
	$(python) benchmarks/cpu.py

# what the compiler makes of every Triton kernel, for GPUs that need not be there
kernels: $(ready)
	$(python) benchmarks/compiled.py --check

# on a machine with a GPU and no network, with its own packages and what lies in wheels/; PARTS may be some of: tests sanitizer bench
gpu:
	bash benchmarks/on_gpu.sh $(PARTS)

lint: $(ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m pyright --pythonpath $(python)

format: $(ready)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

# Made afresh when the dependencies may have changed, so that what was dropped from them cannot linger; editable, so that edits need nothing.
$(ready): pyproject.toml CMakeLists.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(python) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	# what jax-triton imports; it needs no GPU, and is made for Linux, like Triton
	[ "$$(uname)" != Linux ] || $(python) -m pip install --quiet --disable-pip-version-check --no-deps \
	    "jax-cuda13-plugin==$$($(python) -c 'import jaxlib; print(jaxlib.__version__)')"
	touch $@

clean:
	rm -rf .venv* build dist .pytest_cache .ruff_cache .hypothesis digits.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

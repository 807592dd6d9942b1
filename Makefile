# `make demo` and `make test` need python3 (>= 3.11), make and a network for pip; all else goes into $(VENV).
PYTHON ?= python3
VENV   ?= .venv
TESTS  ?= tests

python := $(VENV)/bin/python
ready  := $(VENV)/.ready

.PHONY: demo test bench lint format clean

demo: $(ready)
	$(python) examples/digits.py

# two workers: most of the time goes into compiling, and the simulated devices take cores of their own
test: $(ready)
	$(python) -m pytest -n 2 $(TESTS)

bench: $(ready)
	$(python) benchmarks/cpu.py

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
	touch $@

clean:
	rm -rf .venv* build dist .pytest_cache .ruff_cache .hypothesis digits.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` need Python (>= 3.11), make and a network for pip; all else goes into $(VENV).  CMakeLists.txt decides whether the CUDA
# kernels are compiled, which takes minutes.  Where it surely leaves them out, OFF spares their build tools and pip's --verbose.
PYTHON ?= $(or $(shell .ci/find-python 3.13 3.12 3.11),python3)
VENV   ?= .venv
TESTS  ?= tests
MARK   ?= not slow$(if $(filter tests tests/,$(TESTS)), and not cuda)
SEEDS  ?= 1000
START  ?= 0

python := $(VENV)/bin/python
pip    := $(python) -m pip --quiet --disable-pip-version-check
ready  := $(VENV)/.ready
JAXEXT_CUDA ?= $(if $(findstring JAXEXT_KERNELS,$(CMAKE_ARGS))$(shell nvidia-smi -L 2>/dev/null),AUTO,OFF)
cpp    := $(shell find csrc tests/csrc tests/ptx ptxsim examples docs -name "*.h" -o -name "*.c[cu]" -o -name "*.cuh")

# Python keeps the modules that it has compiled: the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: build demo docs notebooks check-wheels test test-all ptxsim cuda size fuzz mutations bench fit-cpu kernels gpu-programs record wheel kernel-wheel gpu gpu-rehearsal lint ruff clang-format pyright format clean

demo: $(VENV)/.demo
	$(python) examples/digits.py

# all but the long tail, which test-all runs too; two workers: most of the time goes into compiling, and the simulated devices take cores of
# their own; a file stays with one worker, which compiles what its tests share once; a process of Triton's interpreter cannot compile, so the
# tests of kernels are a run of their own
test: $(ready)
	$(if $(filter-out tests/kernels%,$(TESTS)),$(python) -m pytest -n 2 --dist loadfile --durations=20 -m "$(MARK)" $(filter-out tests/kernels%,$(TESTS)))
	$(if $(filter tests tests/ tests/kernels%,$(TESTS)),TRITON_INTERPRET=1 $(python) -m pytest -n 2 --durations=20 -m "$(MARK)" $(or $(filter tests/kernels%,$(TESTS)),tests/kernels))
test-all: MARK =
test-all: test

# Parts of CI that need few files, which .ci/run leaves out while .ci/passed.txt names the files and compilers that are here; each writes its line
# when it passes: ptxsim's own tests, and whatever needs the compiled CUDA kernels
ptxsim: $(ready)
	$(python) -m pytest -n 2 --durations=20 ptxsim/tests
	$(python) .ci/passed.py ptxsim --write
cuda_tests := $(wildcard tests/backends/cuda tests/ptx tests/backends/test_gpu_preference.py \
  tests/benchmarks/test_digests.py tests/benchmarks/test_problems.py tests/project/test_docs_pages.py tests/tables/test_active.py tests/verify/test_cases.py)
cuda: build
	$(python) -m pytest -n 2 --durations=20 -m "not slow" $(cuda_tests)
	$(python) -m benchmarks.record --check
	$(python) .ci/passed.py cuda --write

# random calls of the operations against numpy: SEEDS of them, from START on
fuzz: $(ready)
	$(python) tests/fuzz.py --seeds $(SEEDS) --start $(START) --jobs 2

# planted defects, and which test finds each; DEFECTS may be parts of names of some, or options such as --all and --likely
mutations: $(ready)
	$(python) tests/mutations.py $(DEFECTS)

# compiles the CUDA kernels into build/, with their PTX for tests/ptx: after a change in csrc/ those that depend on it.  pip shows what it compiles with --verbose alone.
build: JAXEXT_CUDA = ON
build: export JAXEXT_PTX = ON
build: $(ready)
	$(cuda_tools)
	$(install) --verbose --no-deps --editable .

bench: $(ready)
	$(python) -m jaxext bench

# the rates by which xla chooses the algorithm of a convolution on this machine's CPU: half an hour, and nothing else may run.
# With ROWS=rows.json it measures nothing, and fits what was measured before
fit-cpu: $(ready)
	$(python) -m benchmarks.fit_cpu $(if $(ROWS),--rows $(ROWS),--json fit_cpu.json)

# what the compilers make of every kernel, for GPUs that need not be there
kernels: $(ready)
	$(python) -m benchmarks.kernel_table --check
	$(python) -m benchmarks.register_hazards

# what XLA's GPU compiler makes of our programs, for a GPU that need not be there; with a CUDA toolkit.  The compiler lies in a folder of its
# own: in the environment, jax would look for a GPU in every program
gpu-programs: $(VENV)/gpu-compiler
	PYTHONPATH=$(abspath $<) $(python) -m pytest -n 2 $(wildcard tests/backends/test_gpu_program*.py)

# the package's record of verified kernels: drops what has changed since, after adding what `python -m jaxext verify --share $(SHARED)` wrote;
# with CHECK=1 it changes nothing, and fails if anything has changed
record: $(ready)
	$(python) -m benchmarks.record $(if $(SHARED),--add $(SHARED)) $(if $(CHECK),--check)

# for machines without a network: in wheels/ jaxext for the Python that makes it, its CUDA kernels compiled (all of them each time, unless
# CMAKE_ARGS=-DJAXEXT_KERNELS=... names a library of them), and what it and its tests need beside jax and Triton 3.6; no GPU is needed
carried := jax-triton==0.3.1 absl-py filelock msgspec platformdirs rich markdown-it-py mdurl pygments "pytest>=9" iniconfig packaging pluggy pytest-xdist execnet
wheel:
	rm -rf wheels.new
	JAXEXT_CUDA=ON $(PYTHON) -m pip wheel --disable-pip-version-check --no-deps --wheel-dir wheels.new .
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest wheels.new $(carried)
	git rev-parse HEAD >wheels.new/COMMIT # for a machine to which the checkout travels without .git
	rm -rf wheels && mv wheels.new wheels

# what `pip install --find-links wheels 'jaxext[cuda13]'` takes: in wheels/ the pure jaxext, and its CUDA kernels for every supported Python that is
# here, or PYTHONS="3.12 3.13"; they are compiled once, unless CMAKE_ARGS=-DJAXEXT_KERNELS=... names a library of them
kernel-wheel:
	packaging/build-wheels

# every wheel and the sdist, each in an empty environment; with CMAKE_ARGS=-DJAXEXT_KERNELS=... those with CUDA kernels too
check-wheels:
	.ci/check-wheels

# lines by folder, words of the docs, bytes of data, of the sdist and of the wheel for every platform
size: $(ready)
	$(python) .ci/size.py

# on a machine with a GPU, maybe without a network, with its own packages and what lies in wheels/; PARTS may be some of: tests suite examples
# sanitizer bench profile.  benchmarks/campaign.sh is for a machine that is lent for minutes
gpu:
	bash benchmarks/on_gpu.sh $(PARTS)

# the same, up to where a GPU is needed, and the three calls of benchmarks/campaign.sh as trials, as if on a machine that has nothing but jax,
# Triton and what compiles: with PYTHON a Python 3.12
gpu-rehearsal:
	PYTHON=$(PYTHON) bash benchmarks/gpu_rehearsal.sh

# also the hooks of .pre-commit-config.yaml
lint: ruff clang-format pyright
pages := --line-length 92 $(shell find docs -name "*.md")
ruff: $(ready)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m ruff format --check $(pages)
clang-format: $(ready)
	$(VENV)/bin/clang-format --dry-run -Werror $(cpp)
pyright: $(ready)
	$(python) -m pyright --pythonpath $(python)

# the site, into build/docs; it needs neither jax nor jaxext, so it has an environment of its own
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
docs_needs := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)-docs/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)-docs
	$(VENV)-docs/bin/pip --quiet --disable-pip-version-check install $$($(PYTHON) -c '$(docs_needs)')
	touch $@

# executes the notebooks of examples, whose outputs are stored in docs/notebooks; after a change of one, NAMES=muon
notebooks: $(ready)
	$(install) --quiet --editable '.[notebooks]'
	$(python) docs/notebooks.py $(NAMES)

format: $(ready)
	$(VENV)/bin/clang-format -i $(cpp)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(python) -m ruff format $(pages)

# Made afresh when the dependencies may have changed, so that what was dropped from them cannot linger; editable, so that edits of Python need
# nothing.  The build's tools stay in it, and builds in build/, so that a change in csrc/ compiles no more than it must.  Python compiles the
# modules that it imports: pip would compile all, which takes longer than to install them.
install = JAXEXT_CUDA=$(JAXEXT_CUDA) $(python) -m pip --disable-pip-version-check install --no-compile --no-build-isolation
define cuda_tools
$(pip) install --no-compile pybind11 jax
$(pip) install --no-compile --no-deps nvidia-cutlass==4.2.0.0
endef
$(VENV)/.demo: pyproject.toml CMakeLists.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(pip) install --no-compile cmake ninja scikit-build-core
	$(if $(filter OFF,$(JAXEXT_CUDA)),,$(cuda_tools))
	$(install) $(if $(filter OFF,$(JAXEXT_CUDA)),--quiet,--verbose) --editable '.[demo]'
	touch $@
$(ready): $(VENV)/.demo $(wildcard ptxsim/pyproject.toml)
	$(install) --quiet --editable '.[test]' --editable ./ptxsim
	# what jax-triton imports; it needs no GPU, and is made for Linux, like Triton
	[ "$$(uname)" != Linux ] || $(pip) install --no-compile --no-deps "jax-cuda13-plugin==$$($(python) -c 'import jaxlib; print(jaxlib.__version__)')"
	touch $@

$(VENV)/gpu-compiler: $(ready)
	$(pip) install --no-compile --no-deps --upgrade --target $@ "jax-cuda13-pjrt==$$($(python) -c 'import jaxlib; print(jaxlib.__version__)')"
	touch $@

clean:
	rm -rf .venv* build dist wheels.new .pytest_cache .ruff_cache .hypothesis digits.png image_convolution.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#!/usr/bin/env bash
# Everything for a machine with a CUDA GPU and no network: installs the checkout, tests it there, and measures.
#
#     benchmarks/on_gpu.sh [tests] [suite] [examples] [sanitizer] [bench]       all five without arguments; each installs first
#
# tests      pytest -m gpu TESTS (tests, without the suite's): the kernels alone, then the whole path
# suite      the problems of the benchmarks, made smaller, by every implementation
# examples   the programs in examples/, by what jaxext prefers and by each implementation that they offer, whose refusals are told; what
#            they print is kept.  Some need scikit-learn and matplotlib
# sanitizer  every STEP-th (25th) test of the depthwise CUDA kernels under compute-sanitizer's memcheck, racecheck and initcheck, and of
#            the Triton kernels under its memcheck, a quarter of LIMIT each
# bench      python -m jaxext bench, with the arguments in BENCH
#
# A failure does not stop the parts after it; the exit status tells of all.  Logs and raw JSON go to OUT (benchmarks/results).  Wanted
# there: python3 with pip, jax and its CUDA plugin, triton, torch, pytest and scikit-build-core with cmake and ninja.  What is missing of
# pure Python, such as jax-triton or rich, is taken from the wheels in WHEELS (wheels/), and so is jaxext, with its CUDA kernels compiled,
# if `make wheel` made it of this checkout for the Python there.  Without that it is compiled on the spot if there is nvcc and
# JAXEXT_CUTLASS says where CUTLASS is; otherwise there are no CUDA kernels.  LIMIT is what a part may take, in seconds.  TRIAL=1
# goes through it all without a GPU, where every such test is skipped, to see that nothing else is in the way.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} wheels=${WHEELS:-wheels} limit=${LIMIT:-480} step=${STEP:-25} trial=${TRIAL:-}
cutlass=${JAXEXT_CUTLASS:-}
site=$PWD/build/site
report=() failed=()

export PYTHONUNBUFFERED=1
export JAX_PLATFORMS=cuda,cpu # the truth of tests is computed on the CPU
[ -z "$trial" ] || JAX_PLATFORMS=cpu
export COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null)}

# part <name> <command...>: within the limit, its output also in a log
part() {
  local name=$1 start=$SECONDS status outcome
  shift
  printf '\n=== %s: %s\n' "$name" "$*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) outcome="passed" ;;
    124 | 137) outcome="FAILED, not done after $limit s" failed+=("$name") ;;
    *) outcome="FAILED, status $status" failed+=("$name") ;;
  esac
  report+=("$name: $outcome ($((SECONDS - start)) s)")
}

# The wheels and jaxext beside each other in build/site, which goes before what is installed; nothing else is changed.
install() {
  local wheel own="" others=() jaxext=(. -C cmake.define.JAXEXT_CUDA=OFF) cuda
  local tag && tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') || return
  for wheel in "$wheels"/*.whl; do
    case ${wheel##*/} in
      jaxext-*-"$tag"-*) own=$wheel ;;
      jaxext-* | "*.whl") ;; # for another Python; no wheel at all
      *) others+=("$wheel") ;;
    esac
  done
  if [ -n "$own" ]; then
    jaxext=("$own")
  elif [ -n "$cutlass" ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; }; then
    jaxext=(. -C cmake.define.JAXEXT_CUDA=ON -C "cmake.define.JAXEXT_CUTLASS=$cutlass")
  fi
  rm -rf "$site"
  set -- --quiet --no-index --no-deps --no-build-isolation --target "$site" "${jaxext[@]}" "${others[@]}"
  "$python" -m pip install "$@" && is_this_checkout && cuda=$(describe) || return
  report+=("CUDA kernels: $cuda")
  if [ "$cuda" != compiled ]; then
    printf '\n!!! NO CUDA KERNELS: %s.  Their tests are skipped and they are not measured.\n' "$cuda"
    [ "${jaxext[*]}" = ". -C cmake.define.JAXEXT_CUDA=OFF" ] # they were not to be expected
  fi
}

# A wheel may be older than the checkout whose tests and commit it would be judged by.
is_this_checkout() {
  local file different=()
  for file in jaxext/*.py; do cmp --silent "$file" "$site/$file" || different+=("$file"); done
  for file in kernels/*.py benchmarks/*.py; do cmp --silent "$file" "$site/jaxext/$file" || different+=("$file"); done
  "$python" -P -c '
import hashlib, pathlib, runpy, sys
hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(pathlib.Path("csrc").iterdir())]
built = runpy.run_path(sys.argv[1])["SOURCES"]
sys.exit(built != hashlib.sha256("".join(hashes).encode()).hexdigest())' "$site/jaxext/_cuda_build.py" || different+=(csrc)
  [ ${#different[@]} = 0 ] || { echo "the wheel is not of this checkout, make it anew: they differ in ${different[*]}" && return 1; }
}

# What is installed, on stderr, and whether the CUDA kernels are ("compiled") or why not.  Without a GPU all tests would be skipped, and so
# pass: that is a failure.
describe() {
  PYTHONPATH=$site "$python" -P -c '
import importlib.metadata, sys, jax, jaxext
from jaxext import _cuda
found = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "triton", "jax-triton")}
print(jaxext.__file__, found, jax.devices(), file=sys.stderr)
print(_cuda.missing() or "compiled")
sys.exit(None if sys.argv[1:] or jax.default_backend() == "gpu" else "jax sees no GPU")' $trial
}

# -P: the tests import the installed package, not the one in the working directory.  Several processes share the GPU.
tests() {
  # shellcheck disable=SC2086
  gpu_tests tests ${TESTS:-tests --ignore=tests/test_gpu_suite.py}
}

suite() {
  gpu_tests suite tests/test_gpu_suite.py
}

gpu_tests() {
  local workers=() name=$1
  shift
  "$python" -c 'import xdist' 2>/dev/null && workers=(-n "$((($(nproc) + 1) / 2))")
  set -- "${workers[@]}" -m gpu --continue-on-collection-errors --durations=10 "$@"
  part "$name" env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -P -m pytest "$@"
}

# Racecheck sees hazards in shared memory, initcheck reads of memory that nobody wrote; memcheck is for the rest.
sanitizer() {
  local cuda=(tests/test_gpu_cuda.py -k test_depthwise_kernel) only=(--kernel-name kernel_substring=depthwise)
  sanitize memcheck-cuda memcheck "${only[*]}" "${cuda[@]}"
  sanitize racecheck-cuda racecheck "${only[*]}" "${cuda[@]}"
  sanitize initcheck-cuda initcheck "${only[*]}" "${cuda[@]}"
  sanitize memcheck-triton memcheck "" tests/kernels
}

# sanitize <name> <tool> <options> <tests...>: without the pools of PyTorch and XLA each array is an allocation of its own, so that what
# goes beyond it is seen
sanitize() {
  local name=$1 tool=$2 options=$3 ids run=()
  shift 3
  mapfile -t ids < <("$python" -P -m pytest -m gpu --collect-only -q "$@" | grep :: | awk -v step="$step" 'NR % step == 1 || step == 1')
  if [ ${#ids[@]} = 0 ]; then
    echo "no test for $name is collected" && failed+=("$name")
    return
  fi
  # shellcheck disable=SC2206
  run=(compute-sanitizer --tool "$tool" $options --target-processes application-only --report-api-errors no --print-limit 20)
  [ -z "$trial" ] && run+=(--error-exitcode 9) || run=()
  limit=$((limit / 4)) part "$name" env XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform \
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${run[@]}" "$python" -P -m pytest -q "${ids[@]}"
}

examples() {
  local file implementation offered
  for file in $(grep -l __main__ examples/*.py); do
    example "$file"
    offered=$("$python" "$file" --help | sed -n 's/.*--implementation {\([^}]*\)}.*/\1/p' | head -1)
    for implementation in ${offered//,/ }; do example "$file" "$implementation"; done
  done
}

# example <file> [implementation]: that a named implementation refuses is an answer; all else that goes wrong is a failure
example() {
  local file=$1 implementation=${2:-} name refusal failures=${#failed[@]}
  name=$(basename "$file" .py)${implementation:+-$implementation}
  set -- ${implementation:+--implementation "$implementation"}
  ! grep -q -- --plot "$file" || set -- "$@" --plot "$out/$name.png"
  # with a process for each GPU: those that it starts otherwise have simulated devices
  [ -n "$trial" ] || ! grep -q -- --gpus "$file" || set -- "$@" --gpus --processes "$(nvidia-smi -L | grep -c ^GPU)"
  limit=$((limit / 4)) part "example-$name" "$python" "$file" "$@"
  [ -n "$implementation" ] && [ ${#failed[@]} -gt "$failures" ] || return 0
  if refusal=$(grep -m 1 -o "[a-z0-9_]*: implementation '.*' does not support this call.*" "$out/example-$name.log"); then
    unset "failed[-1]"
    report[-1]="example-$name: refused, $refusal"
  fi
}

bench() {
  # shellcheck disable=SC2086
  part bench "$python" -P -m jaxext bench --json "$out/gpu.json" --minutes "$(((limit - 60) / 60))" ${trial:+--quick} ${BENCH:-}
}

[ $# -gt 0 ] || set -- tests suite examples sanitizer bench
for name in "$@"; do
  case $name in
    tests | suite | examples | sanitizer | bench) ;;
    *) echo "no part is called $name: tests, suite, examples, sanitizer, bench" >&2 && exit 2 ;;
  esac
done
mkdir -p "$out"
[ -n "$trial" ] || nvidia-smi || { echo "FAILED: nvidia-smi finds no GPU" && exit 1; }
install || { echo "FAILED: installing" && exit 1; }
export PYTHONPATH=$site
for name in "$@"; do "$name"; done

printf '\n=== in all:\n'
printf '%s\n' "${report[@]}"
[ ${#failed[@]} = 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" && exit 1; }

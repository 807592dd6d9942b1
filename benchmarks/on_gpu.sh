#!/usr/bin/env bash
# Everything for a machine with a CUDA GPU and no network: installs the checkout, tests it there, and measures.
#
#     benchmarks/on_gpu.sh [tests] [sanitizer] [bench]       all three without arguments; each installs first
#
# tests      pytest -m gpu: the kernels alone on PyTorch's tensors, then the whole path
# sanitizer  every STEP-th (25th) test of the kernels under compute-sanitizer's memcheck
# bench      benchmarks/gpu.py, with the arguments in BENCH
#
# A failure does not stop the parts after it; the exit status tells of all.  Logs and raw JSON go to OUT (benchmarks/results).  Wanted there:
# python3 with pip, jax and its CUDA plugin, triton, torch, pytest and scikit-build-core with cmake and ninja.  What is missing of pure
# Python, such as jax-triton, is taken from the wheels in WHEELS (wheels/).  LIMIT is what a part may take, in seconds.  TRIAL=1 goes
# through it all without a GPU, where every such test is skipped, to see that nothing else is in the way.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} wheels=${WHEELS:-wheels} limit=${LIMIT:-480} step=${STEP:-25} trial=${TRIAL:-}
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

# The wheels and the checkout beside each other in build/site, which goes before what is installed; nothing else is changed.  Without a
# GPU all tests would be skipped, and so pass: that is a failure.
install() {
  rm -rf "$site" && set -- "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$site" . &&
    if compgen -G "$wheels/*.whl" >/dev/null; then set -- "$@" "$wheels"/*.whl; fi && "$@" &&
    PYTHONPATH=$site "$python" -P -c '
import importlib.metadata, sys, jax, jaxext
found = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "triton", "jax-triton")}
print(jaxext.__file__, found, jax.devices())
sys.exit(None if sys.argv[1:] or jax.default_backend() == "gpu" else "jax sees no GPU")' $trial
}

# -P: the tests import the installed package, not the one in the working directory.  Several processes share the GPU.
tests() {
  local workers=()
  "$python" -c 'import xdist' 2>/dev/null && workers=(-n "$((($(nproc) + 1) / 2))")
  part tests env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -P -m pytest "${workers[@]}" -m gpu --continue-on-collection-errors --durations=10 tests
}

# Without PyTorch's pool each array is an allocation of its own, so that memcheck sees what goes beyond it.
sanitizer() {
  local ids
  mapfile -t ids < <("$python" -P -m pytest -m gpu --collect-only -q tests/kernels | grep :: | awk -v step="$step" 'NR % step == 1 || step == 1')
  if [ ${#ids[@]} = 0 ]; then
    echo "no test of kernels is collected" && failed+=(sanitizer)
    return
  fi
  part sanitizer env XLA_PYTHON_CLIENT_PREALLOCATE=false PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck --target-processes application-only --report-api-errors no --error-exitcode 9 \
    "$python" -P -m pytest -q "${ids[@]}"
}

bench() {
  part bench "$python" benchmarks/gpu.py --json "$out/gpu.json" --minutes "$(((limit - 60) / 60))" ${trial:+--quick} ${BENCH:-}
}

[ $# -gt 0 ] || set -- tests sanitizer bench
for name in "$@"; do
  case $name in
    tests | sanitizer | bench) ;;
    *) echo "no part is called $name: tests, sanitizer, bench" >&2 && exit 2 ;;
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

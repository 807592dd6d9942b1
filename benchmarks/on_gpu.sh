#!/usr/bin/env bash
# Everything for a machine with a CUDA GPU, maybe without a network, and without a limit of time: installs the checkout, tests it, and measures.
#
#     benchmarks/on_gpu.sh [tests] [suite] [examples] [sanitizer] [bench] [profile]       all without arguments; installs first
#
# tests      pytest -m gpu: the whole path and the CUDA kernels (tests/backends/test_gpu*.py, without the suite's), then the Triton kernels alone
#            (tests/kernels), or the files in TESTS; of these, and of the suite's, those that fit pytest's -k ONLY
# suite      the problems of the benchmarks, made smaller, by every implementation
# examples   the programs in examples/, by what jaxext prefers and by each implementation that they offer, whose refusals are told; what
#            they print is kept.  Some need scikit-learn and matplotlib
# sanitizer  every STEP-th (25th) test of all kernels under compute-sanitizer's memcheck, and of the CUDA kernels written by hand under its
#            racecheck and initcheck, a quarter of LIMIT each
# bench      python -m jaxext bench, with the arguments in BENCH
# profile    the GAPS (10) rows of gpu.json that take longest beside the roofline, one after the other under Nsight Compute
#
# A part takes LIMIT (480) seconds at most.  Each file of tests is a process of its own; a worker in it that hangs for EACH (120) seconds, or in
# which an illegal access has left nothing usable, is replaced.  A failure does not stop what comes after it; the exit status tells of all.
#
# Logs, raw JSON and failures.txt go to OUT (benchmarks/results, in the checkout, as any relative path).  Wanted there: python3 with pip and
# its headers, a C compiler, ptxas, jax and its CUDA plugin, triton, torch and scikit-build-core with cmake and ninja.  What else it needs is
# taken from the wheels in WHEELS (wheels/, by `make wheel`): jaxext with its CUDA kernels compiled, if there is one of this checkout for the
# Python there.  Without that it is compiled on the spot, with CUDA kernels if there is nvcc and nvidia-cutlass.  TRIAL=1 goes through it all
# without a GPU, where every such test is skipped, to see that nothing else is in the way.  campaign.sh is for machines with a limit.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} wheels=${WHEELS:-wheels} limit=${LIMIT:-480} step=${STEP:-25} trial=${TRIAL:-}
# shellcheck disable=SC2206
paths=(tests/backends/test_gpu.py tests/backends/test_gpu_{cuda,operations,text}.py tests/kernels/test_*.py)
# shellcheck disable=SC2206
files=(${TESTS:-${paths[@]}})
report=() failed=() logs=() until=0

export PYTHONUNBUFFERED=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # of those that others installed there
export JAX_PLATFORMS=cuda,cpu           # the truth of tests is computed on the CPU
[ -z "$trial" ] || JAX_PLATFORMS=cpu
export COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null)}
# shellcheck source=benchmarks/installed.sh
. benchmarks/installed.sh

# limited <command...>: in the time that is left until `until`; an interrupt first, at which pytest says what failed, and bench keeps its rows
limited() {
  local left=$((until - SECONDS))
  # At a terminal in its foreground, or Ctrl-C would not reach it; else in a group of its own, all of which ends.
  # shellcheck disable=SC2046
  timeout $([ -t 0 ] && echo --foreground) --signal=INT --kill-after=15 $((left > 0 ? left : 1)) "$@"
}

# part <name> <command...>: limited, its output also in a log
part() {
  local name=$1 start=$SECONDS status outcome
  shift
  if [ "$start" -ge "$until" ]; then
    report+=("$name: NOT BEGUN, there was no time left") failed+=("$name")
    return
  fi
  printf '\n=== %s: %s\n' "$name" "$*"
  limited "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  case $status${ONLY:+ of some} in
    0*) outcome="passed" ;;
    "5 of some") outcome="none fits ONLY" ;;
    124* | 137*) outcome="FAILED, not done in time" failed+=("$name") ;;
    *) outcome="FAILED, status $status" failed+=("$name") ;;
  esac
  report+=("$name: $outcome ($((SECONDS - start)) s)") logs+=("$out/$name.log")
}

# quarter <name> <command...>: as a part, in a quarter of its time
quarter() {
  local until=$((SECONDS + limit / 4 < until ? SECONDS + limit / 4 : until))
  part "$@"
}

install() {
  local cuda
  unpack
  case $? in
    0) is_this_checkout || return ;;
    2) "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --target "$site" . || return ;;
    *) return 1 ;;
  esac
  cuda=$(describe) || return
  report+=("CUDA kernels: $cuda")
  [ "$cuda" = compiled ] || printf '\n!!! NO CUDA KERNELS: %s.  Their tests will be skipped, and they will not be measured.\n' "$cuda"
}

# What is installed, on stderr, and whether the CUDA kernels are ("compiled") or why not.
describe() {
  JAX_PLATFORMS=cpu "$python" -P -c '
import importlib.metadata, sys, jaxext, jax_triton
from jaxext.backends.cuda import cuda_binding
sys.path[0] in jaxext.__file__ or sys.exit(f"another jaxext is installed there, which goes before this one: {jaxext.__file__}; uninstall it")
found = {package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "triton", "jax-triton")}
print(jaxext.__file__, found, file=sys.stderr)
print(cuda_binding.missing() or "compiled")'
}

# Without a GPU all tests would be skipped, and so pass.
device() {
  nvidia-smi 2>/dev/null || { echo "NO GPU: nvidia-smi finds none.  Installed: ${report[*]}." && return 1; }
  "$python" -P -c 'import jax; print(jax.devices("gpu"))' || { echo "NO GPU: nvidia-smi finds one, jax does not.  Installed: ${report[*]}." && return 1; }
}

tests() {
  local file name
  for file in "${files[@]}"; do
    name=${file#tests/} name=${name%.py}
    gpu_tests "tests-${name//\//-}" "$file"
  done
}

suite() {
  gpu_tests suite tests/backends/test_gpu_suite.py
}

# gpu_tests <name> <file>: -P: the tests import the installed package, not the one in the working directory.  Several workers share the
# GPU, for most of the time is expected to go into compiling, of which XLA's own choice among algorithms would be a large part.  What
# others' packages warn of there is not a failure.
gpu_tests() {
  set -- "$1" -n "$(nproc)" --max-worker-restart=40 -o faulthandler_timeout="${EACH:-120}" -o faulthandler_exit_on_timeout=1 -W default \
    -m gpu --durations=10 ${ONLY:+-k "$ONLY"} "$2"
  part "$1" env XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS="--xla_gpu_autotune_level=1 --xla_gpu_enable_triton_gemm=false" \
    "$python" -P -m pytest -p xdist "${@:2}"
}

# Racecheck sees hazards in shared memory, initcheck reads of memory that nobody wrote; memcheck is for the rest.  Both know nothing of
# the barriers by which Hopper's copy engine hands over, so CUTLASS's kernels are for memcheck alone.
sanitizer() {
  local cuda=(tests/backends/test_gpu_cuda.py -k test_depthwise_kernel) only=(--kernel-name kernel_substring=depthwise)
  sanitize memcheck-cuda memcheck "" tests/backends/test_gpu_cuda.py -k "test_depthwise_kernel or test_conv_kernel or test_matmul_kernel or test_ragged_kernel"
  sanitize racecheck-cuda racecheck "${only[*]}" "${cuda[@]}"
  sanitize initcheck-cuda initcheck "${only[*]}" "${cuda[@]}"
  sanitize memcheck-triton memcheck "" tests/kernels
}

# sanitize <name> <tool> <options> <tests...>: without the pools of PyTorch and XLA each array is an allocation of its own, so that what
# goes beyond it is seen
sanitize() {
  local name=$1 tool=$2 options=$3 ids run=()
  shift 3
  mapfile -t ids < <(XLA_PYTHON_CLIENT_PREALLOCATE=false limited "$python" -P -m pytest -m gpu --collect-only -q "$@" | grep :: | awk -v step="$step" 'NR % step == 1 || step == 1')
  if [ ${#ids[@]} = 0 ]; then
    echo "no test for $name is collected" && failed+=("$name")
    return
  fi
  # shellcheck disable=SC2206
  run=(compute-sanitizer --tool "$tool" $options --target-processes application-only --report-api-errors no --print-limit 20)
  [ -z "$trial" ] && run+=(--error-exitcode 9) || run=()
  quarter "$name" env XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform \
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${run[@]}" "$python" -P -m pytest -q -W default "${ids[@]}"
}

examples() {
  local file implementation offered
  for file in $(grep -l __main__ examples/*.py); do
    example "$file"
    offered=$(limited "$python" "$file" --help | sed -n 's/.*--implementation {\([^}]*\)}.*/\1/p' | head -1)
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
  quarter "example-$name" "$python" "$file" "$@"
  [ -n "$implementation" ] && [ ${#failed[@]} -gt "$failures" ] || return 0
  if refusal=$(grep -m 1 -o "[a-z0-9_]*: implementation '.*' does not support this call.*" "$out/example-$name.log"); then
    unset "failed[-1]"
    report[-1]="example-$name: refused, $refusal"
  fi
}

minutes() {
  awk "BEGIN { print $1 / 60 }"
}

# What ends the process, such as an illegal access, ends one row: the next try goes on after it.
bench() {
  local try resume=""
  for try in 1 2 3 4 5; do
    # shellcheck disable=SC2086
    part "bench-$try" "$python" -P -m jaxext bench --json "$out/gpu.json" $resume --minutes "$(minutes $((until - SECONDS - 30)))" \
      ${trial:+--quick} ${BENCH:-}
    resume=--resume
    grep -q '"interrupted": true' "$out/gpu.json" && [ $((until - SECONDS)) -gt 60 ] || break
  done
}

# What a call launches is profiled, and neither compiling nor the choice of algorithms before it.
profile() {
  local rank run=(env XLA_PYTHON_CLIENT_PREALLOCATE=false ncu --set full --clock-control none --profile-from-start off) gaps=("$python" -P -m benchmarks.gaps "$out/gpu.json")
  [ -z "$trial" ] || run=()
  part gaps "${gaps[@]}" --most "${GAPS:-10}"
  for rank in $(sed -n 's/^\([0-9]*\)\. .* takes .*/\1/p' "$out/gaps.log"); do
    part "profile-$rank" "${run[@]}" "${gaps[@]}" --run "$rank"
  done
}

parts=(tests suite examples sanitizer bench profile)
[ $# -gt 0 ] || set -- "${parts[@]}"
for name in "$@"; do
  [[ " ${parts[*]} " == *" $name "* ]] || { echo "no part is called $name: ${parts[*]}" >&2 && exit 2; }
done
mkdir -p "$out"
install || { echo "FAILED: installing" && exit 1; }
[ -n "$trial" ] || device || exit 3
for name in "$@"; do
  until=$((SECONDS + limit))
  "$name"
done

cat /dev/null "${logs[@]}" | grep -E '^(FAILED|ERROR) ' >"$out/failures.txt"
printf '\n=== in all:\n'
printf '%s\n' "${report[@]}"
printf '%s tests failed: %s\n' "$(wc -l <"$out/failures.txt")" "$out/failures.txt"
[ ${#failed[@]} = 0 ] || { printf 'FAILED: %s\n' "${failed[@]}" && exit 1; }

#!/usr/bin/env bash
# A machine with a GPU that is lent for minutes, in three calls.  Each ends itself within SECONDS.
#
#     benchmarks/campaign.sh A SECONDS    contact: python -m jaxext verify, each kind of kernel against float64
#     benchmarks/campaign.sh B SECONDS    the headline rows (headline.py)
#     benchmarks/campaign.sh C SECONDS    what was not right in A, again; rows of B that are missing; tuning of eight products, by which the
#                                         kernels' models are calibrated; Nsight Compute on the two largest gaps
#
# B and C go on with gpu.json and contact.jsonl in BEFORE (benchmarks/results), which the calls before left, if they are there.
# All results go straight into OUT (benchmarks/results), where they can be read at any moment, also if the call is killed:
#
#     log.txt (all that was printed)   smi.csv (clocks, power and memory twice a second)   contact.jsonl   verified.json (the record that
#     `make record SHARED=` takes, at this commit)   gpu.json   tuned.json   ncu.txt
#
# What is printed is short, and ends in counts and one table.  Wanted there: what benchmarks/on_gpu.sh wants, and a jaxext for the Python there
# in WHEELS (wheels/, by `make wheel`).  TRIAL=1 goes through it all without a GPU, and measures nothing.
set -u
cd "$(dirname "$0")/.." || exit
call=${1:-} within=${2:-}
[[ $call =~ ^[ABC]$ && $within =~ ^[0-9]+$ && $# = 2 ]] || { echo "want A, B or C, and the seconds that it may take" >&2 && exit 2; }
python=${PYTHON:-python3} out=${OUT:-benchmarks/results} before=${BEFORE:-benchmarks/results} wheels=${WHEELS:-wheels} trial=${TRIAL:-}
log=$out/log.txt most=10800 # characters of all that is printed at the end
end=$((within - 3)) status=0
mkdir -p "$out"
: >>"$log"
export PYTHONUNBUFFERED=1
export JAX_PLATFORMS=${trial:+cpu}
[ -n "$trial" ] || JAX_PLATFORMS=cuda,cpu # truths are computed on the CPU
COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || cat "$wheels/COMMIT" 2>/dev/null)}
export COMMIT
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$PWD/build/cache} # where the record of verified kernels is
# shellcheck source=benchmarks/installed.sh
. benchmarks/installed.sh

say() {
  echo "$@" | tee -a "$log"
}

# part <name> <seconds> <command...>: in the log; an interrupt first, at which each command says what it has
part() {
  local name=$1 seconds=$2 start=$SECONDS code
  local left=$((end - SECONDS - reserve))
  shift 2
  seconds=$((seconds < left ? seconds : left))
  [ "$seconds" -ge 1 ] || { say "$name: not begun, there is no time left" && status=1 && return 1; }
  printf '\n=== %s: %s\n' "$name" "$*" >>"$log"
  from=$(stat -c %s "$log")
  timeout --signal=INT --kill-after=3 "$seconds" "$@" >>"$log" 2>&1
  code=$?
  to=$(stat -c %s "$log")
  say "$name: status $code after $((SECONDS - start)) s"
  [ "$code" = 0 ] || status=1
  return "$code"
}

# The end of what the last part printed, in whole lines.
printed() {
  local text
  text=$(head -c "$to" "$log" | tail -c "+$((from + 1))")
  [ ${#text} -le "$1" ] || text=$(printf '%s' "${text: -$1}" | sed 1d)
  printf '%s\n' "$text"
}

# The minutes that a command may take that ends itself, of so many seconds or of those that are left.
minutes() {
  local left=$((end - SECONDS - reserve - 4))
  awk -v left="$left" -v most="$((${1:-$left} - 4))" 'BEGIN { m = (left < most ? left : most) / 60; print (m > 0 ? m : 0) }'
}

install() {
  unpack && is_this_checkout && "$python" -P -c '
import importlib.metadata as metadata, importlib.util, os, sys
where = importlib.util.find_spec("jaxext").origin
sys.path[0] in where or sys.exit(f"another jaxext goes before this one: {where}")
packages = ("jaxext", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "jax-triton", "nvidia-cudnn-cu13", "nvidia-cublas")
found = {name: metadata.version(name) for name in packages if any(metadata.distributions(name=name))}
print("python", sys.version.split()[0], found, "commit", os.environ.get("COMMIT"), where)'
}

# What the machine is, and one logger for the whole call, which also keeps the driver loaded between processes.
machine() {
  [ -z "$trial" ] || return 0
  timeout 20 nvidia-smi >>"$log" 2>&1 || { say "NO GPU: nvidia-smi finds none" && return 1; }
  for tool in ptxas nvcc ncu; do command -v "$tool" >>"$log" && timeout 10 "$tool" --version >>"$log" 2>&1; done
  nvidia-smi -lms 500 --format=csv,nounits \
    --query-gpu=timestamp,name,pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used,clocks_event_reasons.active >"$out/smi.csv" 2>&1 &
  logger=$!
  trap 'kill "$logger" 2>/dev/null' EXIT
}

# Its record is copied beside the events.
verify() {
  local code
  # shellcheck disable=SC2086
  part "$1" "$2" "$python" -P -m jaxext verify --minutes "$(minutes "$2")" --json "$out/contact.jsonl" ${trial:+--trial} "${@:3}"
  code=$?
  cp "$XDG_CACHE_HOME/jaxext/verified.json" "$out" 2>/dev/null
  return $code
}

headline() {
  local resume=""
  [ -e "$out/gpu.json" ] || [ ! -e "$before/gpu.json" ] || cp "$before/gpu.json" "$out"
  [ ! -e "$out/gpu.json" ] || resume=--resume
  # shellcheck disable=SC2086
  part headline "$1" "$python" -P -m benchmarks.headline --json "$out/gpu.json" $resume --minutes "$(minutes "$1")" ${trial:+--quick}
}

# Eight products, four configurations of each implementation; what is stored stays when the time is over.  XLA chooses no algorithm: it may
# take minutes for a convolution, and the kernels' models are calibrated by the kernels' times.
tune() {
  local case cases=("4096 cubed, 4096x4096x4096 nn" "short, 8192x256x8192 nn" "resnet50 3x3, 64x56x56x64 fprop" "resnet50 3x3, 64x56x56x64 wgrad"
    "mamba k=4, 8x2048x5376 fprop" "mamba k=4, 8x2048x5376 wgrad" "convnext 7x7, 64x56x56x96 fprop" "ensemble 3x3, 16 x 8x28x28x128 fprop")
  local -x XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"
  for case in "${cases[@]}"; do
    [ -z "$trial" ] || case="${case% *} as" # a twin's name
    set -- "$@" --only "$case"
  done
  part tune "$1" "$python" -P -m jaxext tune --table "$out/tuned.json" --candidates 4 --dtype bfloat16 ${trial:+--quick --roles nn fprop} "${@:2}"
  rm -f "$out/tuned.json.lock" # eight files come back from some machines
}

# The launches of one call, after it was compiled: neither compiling nor XLA's choice of algorithms.
profile() {
  local rank gaps=("$python" -P -m benchmarks.gaps "$out/gpu.json")
  local run=(env XLA_PYTHON_CLIENT_PREALLOCATE=false # ncu saves a kernel's memory to run it again
    ncu --section SpeedOfLight --section WarpStateStats --clock-control none --profile-from-start off)
  [ -z "$trial" ] || run=()
  part gaps 30 "${gaps[@]}" --most 2 || return
  found=$(printed 600)
  for rank in $(sed -n 's/^\([0-9]*\)\. .* takes .*/\1/p' <<<"$found"); do
    part "profile-$rank" 45 "${run[@]}" "${gaps[@]}" --run "$rank"
    printed 200000 >>"$out/ncu.txt"
  done
}

# The table of gpu.json, as far as it is, in at most so many characters.
table() {
  local text
  [ -e "$out/gpu.json" ] || { printed "$1" && return; }
  text=$(JAX_PLATFORMS=cpu timeout 15 "$python" -P -m benchmarks.headline --read "$out/gpu.json" 2>&1)
  [ ${#text} -le "$1" ] || text=$(printf '%s' "${text: -$1}" | sed 1d)
  printf '%s\n' "$text" | tee -a "$log"
}

reserve=1
install >>"$log" 2>&1 || { tail -n 3 "$log" && echo "FAILED: installing" && exit 1; }
machine || exit 3
say "installed after $SECONDS s"
case $call in
  A)
    verify contact "$within"
    printed $most
    ;;
  B)
    reserve=12
    headline "$within"
    table $most
    ;;
  C)
    reserve=12 again="" found=""
    left=$((end - reserve - SECONDS))
    if [ -e "$before/contact.jsonl" ]; then
      contact=$before/contact.jsonl
      [ ! "$before" -ef "$out" ] || { mkdir -p build && mv "$contact" build/contact_before.jsonl && contact=build/contact_before.jsonl; }
      verify again $((left / 4)) --again "$contact"
      again=$(printed 2400)
      case $again in *"no case is left"*) status=0 ;; esac
    fi
    headline $((left / 4))
    tune $((left / 4))
    profile
    printf '%s\n' "$again" "$found"
    table $((most - ${#again} - ${#found}))
    ;;
esac
exit $status

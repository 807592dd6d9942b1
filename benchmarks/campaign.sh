#!/usr/bin/env bash
# A machine with a GPU that is lent for minutes, in three calls.  Each ends within WITHIN (560) seconds and leaves two files in OUT:
# campaign-N.tar.gz with all logs and results, and gpu.json, the report of the benchmark so far.
#
#     benchmarks/campaign.sh 1    one case of each family and role, then the benchmark with errors against float64 in every row
#     benchmarks/campaign.sh 2    the benchmark goes on; what the models of clocks are calibrated by; causal convolutions; quantised weights;
#                                 wall times with and without CUDA graphs
#     benchmarks/campaign.sh 3    tests on the device, memcheck of CUTLASS's kernels, the three largest gaps under Nsight Compute
#
# The second and the third go on with REPORT (benchmarks/results/gpu.json), which the call before left.  What a call had no time for stands
# at the end of its output.  benchmarks/on_gpu.sh says what is wanted on the machine, and what its settings do.
set -u
cd "$(dirname "$0")/.."
call=${1:-} out=${OUT:-benchmarks/results} report=${REPORT:-benchmarks/results/gpu.json} within=${WITHIN:-560}
case $call in
  1) parts=(smoke=90 bench) brief=--brief ;;
  2) parts=(bench=160 tune=110 causal=50 quantized=70 walls) brief=--brief ;;
  3) parts=(tests=230 memcheck=120 profile) brief= ;;
  *) echo "which call: 1, 2 or 3" >&2 && exit 2 ;;
esac

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
[ "$call" = 1 ] || [ ! -e "$report" ] || cp "$report" "$results/gpu.json"
{
  PREPARE=${PREPARE:-100} GAPS=3 BENCH="$brief ${BENCH:-}" OUT=$results WITHIN=$((within - 20)) RESUME=$([ -e "$results/gpu.json" ] && echo 1) \
    bash benchmarks/on_gpu.sh "${parts[@]}" 2>&1
  echo $? >"$results/status"
  "${PYTHON:-python3}" - "$results/gpu.json" <<'PYTHON'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
told = json.loads(path.read_text()) if path.exists() else {}
print(f"measured: {len(told.get('rows', ()))} cases")
for what in ("left_out", "begun"):
    print(f"{what.replace('_', ' ')}: {len(told.get(what, ()))} cases", *told.get(what, ()), sep="\n  ")
PYTHON
} | tee "$results/output.log"
status=$(cat "$results/status")

mkdir -p "$out"
tar --create --gzip --file "$out/campaign-$call.tar.gz" --directory "$results" --exclude ./gpu.json . || status=1
[ ! -e "$results/gpu.json" ] || cp "$results/gpu.json" "$out"
exit "$status"

#!/usr/bin/env bash
# The calls for a machine with a GPU and no network, as on that machine, which this one stands in for: what travels is packed and unpacked, and
# an environment made that has what is installed there and no more.  In it, without a network, on_gpu.sh has to get as far as to miss a GPU, and
# each of the three calls of campaign.sh has to end in time, where every kernel is a stand-in and each measurement a trial of the harness; and
# to leave its files if it is killed in the middle.
#
# Wanted: git and a network for the environment.  PYTHON is a Python 3.12.  It begins with `make wheel`; with REUSE=1 the wheels travel that
# are there.  Each call may take CALL (300) seconds: this machine may have few cores.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.12} call=${CALL:-300}
there=(jax==0.11.2 triton==3.6.0 numpy==2.5.2 pybind11 scikit-build-core cmake ninja) # and jax's plugin, without the libraries of CUDA
limit=$((64 << 20))                                                     # bytes that may travel
most=$((16 << 20)) files=8                                              # of each file that comes back, and of how many

fail() {
  echo "REHEARSAL FAILED: $*"
  exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || fail "$python is not Python 3.12, which the machine has; give PYTHON"
! nvidia-smi >/dev/null 2>&1 || fail "there is a GPU: \`make gpu\` is no rehearsal here"
[ -n "${REUSE:-}" ] || make --no-print-directory wheel PYTHON="$python" || fail "no wheels could be made"
compgen -G "wheels/jaxext-*-cp312-*.whl" >/dev/null || fail "no jaxext for Python 3.12 in wheels/"
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
checkout=$temporary/checkout environment=$temporary/environment
mkdir "$checkout"

git ls-files --cached --others --exclude-standard -z | tar --create --null --files-from=- | tar --extract --directory "$checkout"
cp -r wheels "$checkout"
travels=$(du --summarize --bytes "$checkout" | cut -f 1)
echo "what travels: $travels bytes of at most $limit"
[ "$travels" -le "$limit" ] || fail "too much travels"

pip() {
  timeout --foreground 300 "$environment/bin/pip" --disable-pip-version-check "$@"
}
{ "$python" -m venv "$environment" && pip install --quiet "${there[@]}" && pip install --quiet --no-deps jax-cuda13-plugin==0.11.2; } ||
  fail "no environment could be made; is there a network?"
echo "there are: $(pip list --format=freeze | tr '\n' ' ')"

# Nothing of this machine's settings; without a network even for those who look for one, where the system lets us.
alone=(env -i "HOME=$temporary" "PATH=$environment/bin:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/bin:/usr/bin:/bin" PIP_NO_INDEX=1
  "COMMIT=$(git rev-parse HEAD)")
unshare --net true 2>/dev/null && alone=(unshare --net "${alone[@]}") || echo "without a network: for pip alone"
"${alone[@]}" make --no-print-directory -C "$checkout" gpu 2>&1 | tee "$temporary/log" || true
said=$(grep '^NO GPU: ' "$temporary/log") || fail "it did not get as far as to miss a GPU"
grep -q 'CUDA kernels: compiled' <<<"$said" || fail "there are no CUDA kernels"

# campaign <name> <call>: started in a session of its own, with its results in a folder of the name, and what was left before as BEFORE
campaign() {
  setsid "${alone[@]}" TRIAL=1 OUT="$temporary/$1" BEFORE="$temporary/before" bash "$checkout/benchmarks/campaign.sh" "$2" "$call" >"$temporary/$1.out" 2>&1 &
  session=$!
}

# readable <folder>: the files that are there are whole, but for the last line of a log
readable() {
  "$environment/bin/python" - "$1" "$most" "$files" <<'PYTHON'
import json, pathlib, sys
folder, most, files = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
found = sorted(folder.iterdir())
assert len(found) <= files and all(path.stat().st_size <= most for path in found), found
for path in found:
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = text.splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        assert events, f"{path} has no event"
        print(f"  {path.name}: {len(events)} events")
    elif path.suffix == ".json":
        data = json.loads(text)
        print(f"  {path.name}:", f"{len(data['rows'])} rows" if "rows" in data else "whole")
PYTHON
}

# What a call has written first when it is in the middle of its work.
in_the_middle() {
  case $2 in
    A) [ "$(wc -l 2>/dev/null <"$1/contact.jsonl")" -gt 3 ] ;;
    B) grep -q '"results": {"' "$1/gpu.json" ;;
    C) [ -e "$1/tuned.json" ] ;;
  esac 2>/dev/null
}

mkdir "$temporary/before"
for name in A B C; do
  start=$SECONDS
  campaign "$name" "$name"
  status=0
  wait "$session" || status=$?
  took=$((SECONDS - start))
  echo "call $name: status $status after $took s"
  grep ': status \|^installed' "$temporary/$name.out" | sed 's/^/  /'
  [ "$took" -le "$call" ] || fail "call $name took $took s of $call"
  [ "$(wc -m <"$temporary/$name.out")" -le 12000 ] || fail "call $name printed too much"
  for file in log.txt contact.jsonl gpu.json tuned.json; do
    case $name$file in Agpu.json | Atuned.json | Bcontact.jsonl | Btuned.json) continue ;; esac
    [ -s "$temporary/$name/$file" ] || { tail -n 60 "$temporary/$name/log.txt" && fail "call $name left no $file"; }
  done
  readable "$temporary/$name" || fail "call $name left $(ls "$temporary/$name")"

  campaign "$name-killed" "$name"
  start=$SECONDS
  until in_the_middle "$temporary/$name-killed" "$name"; do
    [ $((SECONDS - start)) -le "$call" ] && kill -0 "$session" 2>/dev/null || fail "call $name could not be killed in the middle"
    sleep 0.2
  done
  pkill -KILL --session "$session" || fail "call $name ended before it was killed"
  wait "$session" 2>/dev/null || true
  echo "call $name, killed after $((SECONDS - start)) s:"
  readable "$temporary/$name-killed" || fail "call $name, killed, left $(ls "$temporary/$name-killed")"
  cp "$temporary/$name"/*.json* "$temporary/before"
done
echo "REHEARSED: all but the GPU is there, and what else a machine with one has (torch is left out here)"

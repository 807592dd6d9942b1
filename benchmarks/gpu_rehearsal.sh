#!/usr/bin/env bash
# `make gpu` as on a machine with a GPU and no network, which this one stands in for: what travels is packed and unpacked, an environment
# made that has what is installed there and no more, and in it on_gpu.sh run without a network.  It has to get as far as one can without a
# GPU: everything installed, imported and collected, and a sentence that says what is missing.  Then the three calls of campaign.sh, in
# which each test is skipped and each measurement is a trial of the harness, in CALL (240) seconds each.
#
# Wanted: git, a network for the environment, and nvcc (as there).  PYTHON is a Python 3.12.  It begins with `make wheel`; with REUSE=1 the
# wheels travel that are there.  With SOURCES=1 CUTLASS's headers travel instead of the compiled kernels, which are then compiled on the
# spot; PREPARE is what on_gpu.sh may take for that, in seconds.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.12}
there=(jax==0.11.2 triton==3.6.0 pybind11 scikit-build-core cmake ninja) # and jax's plugin, without the libraries of CUDA
limit=$((64 << 20))                                                     # bytes that may travel

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
if [ -n "${SOURCES:-}" ]; then
  rm "$checkout"/wheels/jaxext-*
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$checkout/wheels" nvidia-cutlass==4.2.0.0
fi
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
  "COMMIT=$(git rev-parse HEAD)" ${PREPARE:+"PREPARE=$PREPARE"})
unshare --net true 2>/dev/null && alone=(unshare --net "${alone[@]}") || echo "without a network: for pip alone"
"${alone[@]}" make --no-print-directory -C "$checkout" gpu 2>&1 | tee "$temporary/log" || true
said=$(grep '^NO GPU: ' "$temporary/log") || fail "it did not get as far as to miss a GPU"
grep -q 'CUDA kernels: compiled' <<<"$said" || fail "there are no CUDA kernels"

for call in 1 2 3; do
  rm -rf "$temporary/out"
  "${alone[@]}" TRIAL=1 OUT="$temporary/out" REPORT="$temporary/gpu.json" WITHIN="${CALL:-240}" timeout "${CALL:-240}" \
    bash "$checkout/benchmarks/campaign.sh" "$call" || fail "call $call of the campaign"
  [ "$(ls "$temporary/out" | tr '\n' ' ')" = "campaign-$call.tar.gz gpu.json " ] || fail "call $call left $(ls "$temporary/out")"
  cp "$temporary/out/gpu.json" "$temporary"
done
echo "REHEARSED: all but the GPU is there, and what else a machine with one has (torch is left out here)"

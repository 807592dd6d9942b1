# shellcheck shell=bash
# Read by on_gpu.sh and campaign.sh: what travels is unpacked beside each other in build/site, which goes before what is installed there, and
# where benchmarks/ is too: the root of the checkout, from where it is imported elsewhere, has the sources of jaxext, which cannot run.
# Wanted: $python, and $wheels, the folder of wheels of `make wheel`.
site=$PWD/build/site

# In a second or two: wheels of modules alone need no pip.  Status 2 where there is no jaxext for the Python there.
unpack() {
  rm -rf "$site"
  mkdir -p "$site"
  ln -s "$PWD/benchmarks" "$site/benchmarks"
  export PYTHONPATH=$site
  "$python" - "$site" "$wheels" <<'PYTHON'
import pathlib, sys, zipfile
site, wheels = map(pathlib.Path, sys.argv[1:])
tag, found = "cp%d%d" % sys.version_info[:2], sorted(wheels.glob("*.whl"))
carried = [wheel for wheel in found if not wheel.name.startswith("jaxext-") or wheel.name.split("-")[2] == tag]
for wheel in carried:
    with zipfile.ZipFile(wheel) as archive:
        if strays := [name for name in archive.namelist() if ".data/" in name and "/scripts/" not in name]:
            sys.exit(f"{wheel.name} is more than a folder of modules: {strays[0]}")
        archive.extractall(site)
if not any(wheel.name.startswith("jaxext-") for wheel in carried):
    print(f"no jaxext for {tag} in {wheels}: `make wheel` makes one")
    sys.exit(2)
PYTHON
}

# A wheel may be older than the checkout whose tests and commit it would be judged by.
is_this_checkout() {
  local file different=()
  while read -r file; do cmp --silent "$file" "$site/$file" || different+=("$file"); done < <(find jaxext -name '*.py')
  while read -r file; do cmp --silent "$file" "$site/jaxext/$file" || different+=("$file"); done < <(find kernels -name '*.py')
  "$python" -P -c '
import hashlib, pathlib, runpy, sys
files = sorted(pathlib.Path("csrc").rglob("*.*"), key=pathlib.Path.as_posix)
hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.parent.name != "launcher"]
built = runpy.run_path(sys.argv[1])["SOURCES"]
sys.exit(built != hashlib.sha256("".join(hashes).encode()).hexdigest())' "$site/jaxext/_cuda_build.py" || different+=(csrc)
  [ ${#different[@]} = 0 ] || { echo "the wheel is not of this checkout, make it anew: they differ in ${different[*]}" && return 1; }
}

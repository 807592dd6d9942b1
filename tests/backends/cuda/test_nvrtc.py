"""CUDA C++ source text is compiled by NVRTC, and its cache survives what other processes and crashes do to it.

Needs NVRTC, and no GPU.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from jaxext.backends import nvrtc

SCALE = "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, on disk and in the process."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    monkeypatch.setenv("JAXEXT_NVRTC_CACHE", str(tmp_path / "cache"))
    nvrtc._cached.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def runs(monkeypatch):
    """The names of the kernels that NVRTC compiled."""
    names, run = [], nvrtc._Nvrtc.run

    def record(self, source, kernel, *rest):
        names.append(kernel)
        return run(self, source, kernel, *rest)

    monkeypatch.setattr(nvrtc._Nvrtc, "run", record)
    return names


def anew(*args, **kwargs):
    """Compile as in a new process: only the cache on disk is left."""
    nvrtc._cached.cache_clear()
    return nvrtc.compile(*args, **kwargs)


@pytest.mark.parametrize(("arch", "real"), [(90, "sm_90a"), (80, "sm_80"), (120, "sm_120a")])
def test_machine_code_and_ptx_are_of_the_real_architecture(arch, real):
    compiled = nvrtc.compile(SCALE, "scale", arch)
    assert compiled.cubin.startswith(b"\x7fELF") and b"_Z5scalePf" in compiled.cubin and b".debug_line" in compiled.cubin
    assert f".target {real}\n" in compiled.ptx and ".entry _Z5scalePf(" in compiled.ptx
    assert (compiled.name, compiled.log) == ("_Z5scalePf", "")


@pytest.mark.parametrize(
    ("source", "kernel", "name"),
    [
        (f'extern "C" {SCALE}', "scale", "scale"),
        (f"namespace ns {{ {SCALE} }}", "ns::scale", "_ZN2ns5scaleEPf"),
        ("template <class T, int N> __global__ void f(T* x) { *x *= N; }", "f<float, 128>", "_Z1fIfLi128EEvPT_"),
        ("#include <cuda_bf16.h>\n__global__ void f(__nv_bfloat16* x) { *x = __hmul(*x, *x); }", "f", "_Z1fP13__nv_bfloat16"),
        ("#include <cuda_fp16.h>\n__global__ void f(__half* x) { *x = __hmul(*x, *x); }", "f", "_Z1fP6__half"),
        ("#include <cuda_fp8.h>\n__global__ void f(__nv_fp8_e4m3* x) { *x = __nv_fp8_e4m3(1.f); }", "f", "_Z1fP13__nv_fp8_e4m3"),
    ],
)
def test_kernels_are_named_by_expressions_and_headers_of_cuda_are_found(source, kernel, name):
    compiled = nvrtc.compile(source, kernel, 90)
    assert compiled.name == name and f".entry {name}(" in compiled.ptx and name.encode() in compiled.cubin


def test_warnings_are_in_the_log_and_options_are_passed():
    source = "__global__ void f(float* x) { int y; *x = VALUE; }"
    first, second = (nvrtc.compile(source, "f", 90, options=[f"-DVALUE={value}", "-std=c++20"]) for value in (1, 2))
    assert 'f.cu(1): warning #177-D: variable "y"' in first.log and "c++17" not in first.log
    assert "1065353216" in first.ptx and "1073741824" in second.ptx  # bits of 1.0 and 2.0


@pytest.mark.parametrize(
    ("source", "kernel", "options", "messages"),
    [
        (
            *("\n__global__ void f(float* x) {\n  *x = y;\n}\n", "f", []),
            ['kernel f: NVRTC does not compile it for sm_90a\nscale.cu(3): error: identifier "y" is undefined'],
        ),
        (
            *(SCALE, "scal", []),
            ["NVRTC does not compile it for sm_90a: 'scal' does not name one kernel of scale.cu. "],
        ),
        (
            "template <class T> __global__ void f(T* x) {}",
            "f",
            [],
            ['does not name one kernel of scale.cu. A template needs its arguments, as in "f<float>"'],
        ),
        ("__device__ void f() {}", "f", [], ["does not name one kernel", "non-__global__"]),
        (SCALE, "scale", ["--fast"], ["NVRTC does not compile it for sm_90a, with options ['--fast']\n", "unrecognized option --fast"]),
        (SCALE, "scale", ["-arch=sm_100"], ["no kernel for this architecture in the result, with options ['-arch=sm_100']"]),
        (
            "__global__ void f(int* x) { __shared__ int y[100000]; y[threadIdx.x] = *x; __syncthreads(); *x = y[3]; }",
            "f",
            [],
            ["uses too much shared data"],
        ),
        (f"#include <math.h>\n{SCALE}", "scale", [], ["scale.cu(1): ", "the functions of <math.h> without it"]),
        (f"#include <cstdint>\n{SCALE}", "scale", [], ["scale.cu(1): ", "NVRTC has no standard library", "<cuda/std/cstdint>"]),
        (f"{SCALE}\0", "scale", [], ["source has a null character"]),
    ],
)
def test_messages_name_the_users_lines_kernels_and_options(source, kernel, options, messages, cache):
    with pytest.raises(nvrtc.CompileError) as error:
        nvrtc.compile(source, kernel, 90, options=options, file="scale.cu")
    assert all(message in str(error.value) for message in messages), error.value
    assert not cache.exists()


def test_an_unknown_architecture_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(nvrtc.CompileError, match="(?s)does not compile it for sm_10.*invalid value for --gpu-architecture"):
        nvrtc.compile(SCALE, "scale", 10)
    with pytest.raises(nvrtc.CompileError, match="kernel scale: includes has .*nowhere, which is no folder"):
        nvrtc.compile(SCALE, "scale", 90, includes=[tmp_path / "nowhere"])


@pytest.mark.parametrize("how", ["includes", "-I", "-I DIR"])
def test_a_changed_header_is_seen(how, tmp_path, runs):
    source = '#include "sub/factor.h"\n__global__ void f(float* x) { *x *= FACTOR; }'
    folder = tmp_path / "headers"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/factor.h").write_text('#include "value.h"\n#define FACTOR VALUE\n')
    (folder / "sub/up").symlink_to(folder)  # a circle
    given = {"includes": {"includes": [folder]}, "-I": {"options": [f"-I{folder}"]}, "-I DIR": {"options": ["-I", str(folder)]}}[how]
    for factor, bits in [(3, "0f40400000"), (5, "0f40A00000")]:
        (folder / "sub/value.h").write_text(f"#define VALUE {factor}.f\n")
        os.utime(folder / "sub/value.h", ns=(0, factor))
        assert bits in nvrtc.compile(source, "f", 90, **given).ptx
        assert bits in anew(source, "f", 90, **given).ptx
    assert runs == ["f", "f"]


def test_headers_of_the_working_directory_are_not_found(tmp_path, monkeypatch):
    """Headers beside the source are; the cache sees their changes (tests/ops/test_cuda_kernel.py)."""
    (tmp_path / "factor.h").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nvrtc.CompileError, match=r"scale.cu.1.: .*not open source file(?s:.*)of .(?:/.*/)?scale.cu"):
        nvrtc.compile(f'#include "factor.h"\n{SCALE}', "scale", 90)
    nvrtc.compile(f'#include "factor.h"\n{SCALE}', "scale", 90, file=str(tmp_path / "scale.cu"))


def test_what_is_compiled_is_cached_in_the_process_and_on_disk(cache, runs):
    first = nvrtc.compile(SCALE, "scale", 90)
    assert nvrtc.compile(SCALE, "scale", 90) is first and anew(SCALE, "scale", 90) == first and runs == ["scale"]
    assert len([*cache.iterdir()]) == 1
    nvrtc.compile(SCALE, "scale", 80)
    nvrtc.compile(SCALE, "scale", 90, file="other.cu")
    nvrtc.compile(f"{SCALE} ", "scale", 90)
    assert len(runs) == len([*cache.iterdir()]) == 4


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, n=n: data[: len(data) * n // 4] for n in range(4)),  # of which the first is empty
        *(lambda data, n=n: flipped(data, len(data) * n // 4) for n in range(4)),
        lambda data: data + b"\0",
        lambda data: data.partition(b"\n")[2],
    ],
)
def test_a_damaged_entry_is_compiled_again_and_replaced(damage, cache, runs):
    first = nvrtc.compile(SCALE, "scale", 90)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert anew(SCALE, "scale", 90) == first and runs == ["scale", "scale"]
    assert entry.read_bytes() == whole


def test_an_entry_under_another_key_is_not_used(cache, runs):
    nvrtc.compile(SCALE, "scale", 80)
    (other,) = cache.iterdir()
    first = nvrtc.compile(SCALE, "scale", 90)
    (entry,) = {*cache.iterdir()} - {other}
    entry.write_bytes(other.read_bytes())
    assert anew(SCALE, "scale", 90) == first and len(runs) == 3


PROGRAM = f"""
import os, signal, sys
from jaxext.backends import nvrtc
if sys.argv[1:] == ["killed"]:
    nvrtc.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
for n in range(3):
    compiled = nvrtc.compile({SCALE!r}.replace("2", str(n + 3)), "scale", 90)
    assert compiled.name in compiled.ptx
"""


def process(*args):
    root = pathlib.Path(nvrtc.__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *args], cwd=root)


def test_a_killed_process_leaves_no_entry_and_two_at_once_leave_whole_ones(cache, runs):
    assert process("killed").wait() == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".")
    assert [each.wait() for each in [process(), process()]] == [0, 0]
    entries = {path: path.read_bytes() for path in cache.iterdir() if path != left}
    assert len(entries) == 3
    for n in range(3):
        anew(SCALE.replace("2", str(n + 3)), "scale", 90)
    assert not runs


def test_threads_get_the_same():
    found = []
    threads = [threading.Thread(target=lambda: found.append(nvrtc.compile(SCALE, "scale", 90))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({*found}) == 1


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, runs):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", ""):  # the former fails for root too, whom no permissions stop
        monkeypatch.setenv("JAXEXT_NVRTC_CACHE", str(folder))
        assert anew(SCALE, "scale", 90) == anew(SCALE, "scale", 90)
    assert len(runs) == 4
    monkeypatch.setenv("JAXEXT_NVRTC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    anew(SCALE, "scale", 90)
    assert not [*(tmp_path / "cache").iterdir()]


def test_where_nvrtc_is_missing_a_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nvrtc, "_libraries", lambda: ["/nowhere/libnvrtc.so.13", "libc.so.6"])
    nvrtc._nvrtc.cache_clear()
    try:
        assert "pip install 'jaxext[nvrtc]'" in (nvrtc.missing() or "")
        with pytest.raises(RuntimeError, match="NVRTC, which compiles .* was not found: .*/nowhere/libnvrtc.so.13"):
            nvrtc.compile(SCALE, "scale", 90)
    finally:
        nvrtc._nvrtc.cache_clear()

"""The launcher of kernels that are given as text, csrc/launcher: called as XLA calls it, on a CUDA driver that only records.

Needs g++; no GPU and no CUDA.  The driver is tests/csrc/stand_in_driver.cc, in a process of its own, where nothing else loads a driver.
"""

import base64
import concurrent.futures
import ctypes
import functools
import multiprocessing
import os
import pathlib
import shutil
import struct
import subprocess

import call_frame
import cpp
import jax
import pytest
from call_frame import INTERNAL, INVALID, OK, ROOT, STAGES

from jaxext.backends import launcher
from jaxext.backends.ffi_version import running_version

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")
SOURCE = ROOT / "csrc/launcher/launcher.cc"
OPERANDS, RESULTS = [("float32", (2, 3), 0x1122334455667788), ("int8", (5,), 2 << 44)], [("bfloat16", (7,), 3 << 44)]
HALF = int.from_bytes(struct.pack("<f", 0.5), "little")
BOXES = dict(grid=(3, 2, 1), block=(128, 1, 1), cluster=(1, 1, 1))
WHERE = "; grid (3, 2, 1), block (128, 1, 1), cluster (1, 1, 1), 0 bytes of dynamic shared memory"


@functools.cache
def driver():
    return cpp.shared_library([ROOT / "tests/csrc/stand_in_driver.cc"], ["-std=c++17", "-fPIC", "-O0", "-Wl,-soname,libcuda.so.1"])


def ask(stages, arguments, fail=(), device=0, loaded=True):
    """The answers of the handler in these stages, and what the driver is asked; it runs in the other process."""
    if loaded:
        driver().StandInRecord.restype = ctypes.c_char_p
        driver().StandInDevice(device)
        for function, result in dict(fail).items():
            driver().StandInFail(function.encode(), result)
    library = call_frame.library(SOURCE)
    answers = [call_frame.call(library, getattr(library, f"jaxext_raw_{stage}"), STAGES[stage], *arguments) for stage in stages]
    if not loaded:
        return answers, []
    for function in dict(fail):
        driver().StandInFail(function.encode(), 0)
    return answers, driver().StandInRecord().decode().splitlines()


def ask_metadata(stage):
    library, major, minor, traits = call_frame.library(SOURCE), ctypes.c_int32(), ctypes.c_int32(), ctypes.c_uint32()
    handler, message = getattr(library, f"jaxext_raw_{stage}"), ctypes.create_string_buffer(1000)
    code = library.AskMetadata(handler, *map(ctypes.byref, (major, minor, traits)), message, ctypes.c_int64(1000))
    return code, (major.value, minor.value), traits.value


def register():
    path = pathlib.Path(call_frame.library(SOURCE)._name)
    launcher.find = lambda: path
    launcher.register()
    launcher.register()
    return launcher.missing()


def process():
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def other():
    with process() as pool:
        yield pool


def arguments(image="add 8 8 4", operands=OPERANDS, results=RESULTS, **changes):
    attributes = dict(image=base64.b64encode(image.encode()).decode(), digest=image, name="add", shared=0, **BOXES)
    attributes |= dict(parameters=(0, 2, 0, 0, 4, HALF)) | changes
    return operands, results, {name: value for name, value in attributes.items() if value is not None}


def asked(other, stages, *, fail=(), device=0, **changes):
    return other.submit(ask, stages.split(), arguments(**changes), fail, device).result()


def test_a_kernel_is_loaded_once_and_launched(other):
    image = "add 8 8 4 8 1 2 8 ? ???>>>~~~"  # + and / are digits of its base64 too
    assert {"+", "/"} < {*base64.b64encode(image.encode()).decode()}
    parameters = (0, 2, 0, 0, 4, HALF, 8, -2, 1, 0x7F, 2, 0x1234, 0, 1)
    load = [f"cuLibraryLoadData {image}", "cuLibraryGetKernel add", "cuKernelGetFunction"]
    answers, record = asked(other, "initialize", image=image, parameters=parameters)
    assert (answers, record) == ([(OK, "")], load)
    launch = "cuLaunchKernelEx 3 2 1 128 1 1 0, 0000000000300000 8877665544332211 0000003f feffffffffffffff 7f 3412 0000000000200000"
    answers, record = asked(other, "execute initialize execute", image=image, parameters=parameters)
    assert (answers, record) == ([(OK, "")] * 3, [launch, load[-1], launch])
    _, record = asked(other, "execute", image=image, parameters=parameters, digest="another")  # not initialised
    assert record == [*load[:2], launch]
    answers, record = asked(other, "execute", image="empty", name="empty", parameters=())
    assert answers == [(OK, "")] and record[-1] == "cuLaunchKernelEx 3 2 1 128 1 1 0,"


def test_limits_are_raised_once_for_each_device(other):
    """A smaller call lowers none: XLA may initialize it last."""
    call = functools.partial(asked, other, "execute", image="add 8 8 4 ")
    limits = lambda **more: [line for line in call(**more)[1] if "Attribute" in line]
    assert limits(shared=1000) == ["cuKernelSetAttribute 8 1000 0"]
    assert limits(shared=1000) == limits(shared=999) == limits() == []
    assert limits(shared=1000, device=1) == ["cuKernelSetAttribute 8 1000 1"]
    assert limits(shared=2000) == ["cuKernelSetAttribute 8 2000 0"]
    assert limits(cluster=(2, 2, 2)) == []
    assert limits(cluster=(2, 4, 2)) == ["cuKernelSetAttribute 14 1 0"]
    answers, record = call(cluster=(4, 4, 1), shared=2000)
    assert answers == [(OK, "")]
    assert record[-1].startswith("cuLaunchKernelEx 3 2 1 128 1 1 2000, attribute 4 4 4 1, ") and "Attribute" not in "".join(record[:-1])


def test_without_a_context_initialize_succeeds(other):
    fail = dict(cuKernelGetFunction=201, cuCtxGetDevice=201)
    answers, _ = asked(other, "initialize execute", image="add 8 8 4  ", fail=fail, shared=1)
    where = WHERE.replace(" 0 bytes", " 1 bytes")
    assert answers == [(OK, ""), (INTERNAL, f"kernel add: cuCtxGetDevice failed with CUDA_ERROR_201 (what went wrong){where}")]


FAULTS = {
    **{
        f"{how} {name}": ({name: value}, f"attribute {name} is missing or of another type, want {kind}")
        for how, values in (("no", (None, None, None)), ("another", (1, 1.0, "x")))
        for kind, value, names in (
            ("a string", values[0], ("digest", "image")),
            ("an int64", values[1], ("shared",)),
            ("int64s", values[2], ("grid", "block", "cluster", "parameters")),
        )
        for name in names
    },
    "an attribute too many": (dict(more=1), "9 attributes, want 8"),
    "two sizes": (dict(grid=(1, 1)), "attribute grid is (1, 1), want three positive int32"),
    "no threads": (dict(block=(0, 1, 1)), "attribute block is (0, 1, 1), want three positive int32"),
    "a large cluster": (dict(cluster=(1, 1, 2**31)), "attribute cluster is (1, 1, 2147483648), want three positive int32"),
    "negative": (dict(shared=-1), "attribute shared is -1, want a number of bytes"),
    "half a pair": (dict(parameters=(0, 1, 4)), "attribute parameters has 3 numbers, want pairs"),
    "three bytes": (dict(parameters=(0, 1, 3, 4)), "parameter 1 has 3 bytes, want 0 (a pointer), 1, 2, 4 or 8"),
    "a buffer too many": (dict(parameters=(0, 3)), "parameter 0 is buffer 3, there are 3"),
    "a buffer before the first": (dict(parameters=(0, -1)), "parameter 0 is buffer -1, there are 3"),
    "fewer parameters": (dict(parameters=(0, 1, 0, 2)), "its parameters have (8, 8, 4) bytes, the call gives (8, 8)"),
    "another size": (dict(parameters=(0, 1, 0, 2, 8, 0)), "its parameters have (8, 8, 4) bytes, the call gives (8, 8, 8)"),
    **{
        f"base64 {text!r}": (dict(image=text, digest=text), "attribute image is not base64")
        for text in ("", "YQ", "YQ=", "Y===", "=YQ=", "Y=Q=", "YQ==YQ==", "Y\n==", "Y-_=")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(other, fault):
    changes, message = FAULTS[fault]
    given = arguments()
    given[2].update(changes)
    given = *given[:2], {name: value for name, value in given[2].items() if value is not None}
    answers, record = other.submit(ask, ["initialize", "execute"], given).result()
    assert answers == [(INVALID, f"kernel add: {message}")] * 2
    assert not any("Launch" in line for line in record)


def test_a_kernel_without_a_name(other):
    answers, _ = asked(other, "execute", name=None)
    assert answers == [(INVALID, "jaxext_raw_v1: attribute name is missing or of another type, want a string")]


FAILURES = {
    "cuLibraryLoadData": (200, "cuLibraryLoadData failed with CUDA_ERROR_200 (what went wrong)"),
    "cuLibraryLoadData ": (
        222,
        "cuLibraryLoadData failed with CUDA_ERROR_222 (what went wrong): the driver is older than the compiler that made the PTX",
    ),
    "cuLibraryGetKernel": (500, "cuLibraryGetKernel failed with CUDA_ERROR_500 (what went wrong): the image has no kernel of this name"),
    "cuKernelSetAttribute": (1, "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES) failed with CUDA_ERROR_1 (what went wrong)"),
    "cuLaunchKernelEx": (999, "cuLaunchKernelEx failed with error 999 (unknown)"),
}


@pytest.mark.parametrize("function", FAILURES)
def test_failures(other, function):
    """Each is a sentence, and the next call tries anew."""
    result, message = FAILURES[function]
    call = functools.partial(asked, other, "execute", digest=function, shared=1)
    answers, record = call(fail={function.strip(): result})
    where = WHERE.replace(" 0 bytes", " 1 bytes")
    assert answers == [(INTERNAL, f"kernel add: {message}{where}")]
    assert ("cuLibraryUnload" in record) == (function == "cuLibraryGetKernel")
    answers, record = call()
    assert answers == [(OK, "")] and record[-1].startswith("cuLaunchKernelEx")


def test_a_failure_of_initialize(other):
    answers, _ = asked(other, "initialize", fail=dict(cuKernelGetFunction=2))
    assert answers == [(INTERNAL, f"kernel add: cuKernelGetFunction failed with CUDA_ERROR_2 (what went wrong){WHERE}")]


@pytest.mark.parametrize("there", ["no driver", "an older driver"])
def test_no_driver(there, tmp_path, monkeypatch):
    if there == "no driver":
        (tmp_path / "libcuda.so.1").write_text("none\n")
        reason = "no CUDA driver: libcuda.so.1 does not load (.*libcuda.so.1: .*)"
    else:
        subprocess.run(["g++", "-shared", "-x", "c++", os.devnull, "-o", tmp_path / "libcuda.so.1"], check=True)
        reason = "the CUDA driver has no cuGetErrorName, want one of CUDA 12.0 or newer"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    with process() as pool:
        answers, _ = pool.submit(ask, ["initialize", "execute"], arguments(), loaded=False).result()
    assert [code for code, _ in answers] == [INTERNAL] * 2
    for _, message in answers:
        start, _, end = f"kernel add: {reason}".partition(".*")
        assert message.startswith(start) and message.endswith(end[-1:])


def test_handlers(other):
    version = running_version()
    assert other.submit(ask_metadata, "execute").result() == (OK, version, 1)  # it may be in a command buffer
    assert other.submit(ask_metadata, "initialize").result() == (OK, version, 0)
    assert other.submit(register).result() is None


def test_what_is_declared_of_the_driver():
    """The layouts are those of CUDA's header."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    include = next((path for home in (*homes, "/usr/local/cuda") if home and (path := pathlib.Path(home, "include/cuda.h")).exists()), None)
    if include is None:
        pytest.skip("cuda.h is not there")
    flags = ["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{cpp.CSRC}", "-isystem", include.parent]
    subprocess.run(["g++", *flags, "-isystem", jax.ffi.include_dir(), ROOT / "tests/csrc/launcher_abi.cc"], check=True)


@pytest.fixture
def looked_up_anew():
    launcher.missing.cache_clear()
    yield
    launcher.missing.cache_clear()


@pytest.mark.usefixtures("looked_up_anew")
def test_no_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "find", lambda: None)
    assert "launcher" in (launcher.missing() or "")
    with pytest.raises(RuntimeError, match="no launcher of kernels that are given as text: .*launcher"):
        launcher.register.__wrapped__()
    launcher.missing.cache_clear()
    (tmp_path / "_launcher.abi3.so").write_text("none\n")
    monkeypatch.setattr(launcher, "find", lambda: tmp_path / "_launcher.abi3.so")
    assert (launcher.missing() or "").startswith("the launcher does not load: ")

"""Loads of the CUDA kernels and of their attributes: once for each device, in the handlers' initialize stage or else at the first
launch, never in both.  The runtime is that of cuda_launches.py."""

import cuda_launches
import pytest
from cuda_cases import INTERNAL, OK
from cuda_launches import WEIGHT_ONLYS, ask, load, prepared, runtime
from test_cuda_launches import FRESH, PORTABLE, SOME, one_of_each, some_weight_onlys

pytestmark = pytest.mark.cuda


def loading(case, call, device):
    """Return the loads and settings of a call that succeeds, and its launches."""
    status, asked = call(case, device)
    assert status == OK, asked
    entries = [entry for entry in prepared() if "kernel" in entry]
    assert all(entry["relaxed"] for entry in entries) and not runtime().CapturesRelaxed()
    kinds = [(kind, entry[kind], entry["kernel"]) for entry in entries for kind in ("load", "shared", "carveout") if kind in entry]
    return kinds, asked


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("first", [load, ask])
def test_a_kernel_is_loaded_once_on_each_device(family, first):
    """The stage that is called first loads it.  Initialize makes no descriptor and launches nothing."""
    case = one_of_each()[family]
    for device in (next(FRESH), next(FRESH)):
        loaded, asked = loading(case, first, device)
        assert bool(asked) == (first is ask)
        again, nothing = loading(case, load, device)
        assert again == [] and nothing == []
        again, (*_, launch) = loading(case, ask, device)
        assert again == [] and not [entry for entry in prepared() if "asks" in entry], "a device is asked once"
        want = [("load", device, launch["kernel"])]
        if family not in PORTABLE:
            want.append(("shared", launch["shared"], launch["kernel"]))
        if launch["carveout"] >= 0:
            want.append(("carveout", launch["carveout"], launch["kernel"]))
        assert loaded == want


def test_two_blocks_of_few_rows_share_a_multiprocessor():
    """Kernels of products with integers share one if their registers allow it."""
    found = {}
    for row, case in ((each, case) for each in WEIGHT_ONLYS for case in some_weight_onlys(each, 30)):
        status, (launch,) = ask(case)
        assert status == OK
        found.setdefault((row["bits"], launch["carveout"]), set()).add(launch["kernel"])
    kernels = {key: len(names) for key, names in found.items()}
    assert kernels == {(4, -1): 6, (4, 25): 2, (8, -1): 6, (8, 25): 2}


def test_the_drivers_functions_are_found_once(monkeypatch):
    """A function that was not found is looked for again, and its lack is an error of the call alone."""
    library = runtime(copy=1)  # in which no other test has found them
    monkeypatch.setattr(cuda_launches, "runtime", lambda: library)
    for name, case in one_of_each().items():
        if name in PORTABLE:
            continue
        status, message = ask(case, 0, "cudaGetDriverEntryPointByVersion")
        assert status == INTERNAL and message.startswith(f"{name}: the driver refuses a TMA descriptor, CUDA error "), message
        assert not library.Remembers()
    found = []
    for case in [*one_of_each().values()] * 2:
        assert ask(case)[0] == OK
        found += [entry["finds"] for entry in prepared() if "finds" in entry]
    assert sorted(found) == ["cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"]

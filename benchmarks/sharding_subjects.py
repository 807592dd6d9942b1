"""The operations whose splits over devices `python -m jaxext.testing.shardings` verifies: jaxext's, and lax's namesake beside it."""

from jaxext.testing.sharding_worker import Function, drawn


def subjects(name, source, *shapes, lax=True):
    """The subject of jaxext, and that of lax."""
    args = tuple(drawn(shape, k).astype("float32") for k, shape in enumerate(shapes))
    return [Function(f"{name}, {ops}", source.replace("OPS", ops), args) for ops in ("jaxext", *(["lax"] if lax else []))]


def conv(name, x, w, *, strides=1, padding="SAME", **how):
    axes = "DHW"[5 - len(x) :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    more = "".join(f", {key}={value}" for key, value in how.items())
    call = f"x, w, {(strides,) * len(axes)}, {padding!r}, dimension_numbers={numbers}{more}, out_sharding=out_sharding"
    return subjects(name, f"lambda x, w, out_sharding=None: OPS.conv_general_dilated({call})", x, w)


SUBJECTS = [
    *conv("dense", (8, 8, 8, 8), (3, 3, 8, 8)),
    *subjects(
        "matmul",
        "lambda x, w, out_sharding=None: OPS.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=out_sharding)",
        (8, 16),
        (16, 8),
    ),
]

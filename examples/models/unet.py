"""U-Nets that restore their input, in two and three dimensions, in equinox.   pip install equinox; python examples/models/unet.py"""

import functools

import compare
import jax
import jax.numpy as jnp


def make(shape, widths, up):
    """Transposed layers have `up` taps, by 2."""
    import equinox as eqx

    axes, pairs = len(shape) - 2, list(zip(widths, widths[1:], strict=False))

    def run(layers, x):
        return functools.reduce(lambda x, layer: jax.nn.relu(layer(x)), layers, x)

    @eqx.filter_jit
    def network():
        keys = iter(jax.random.split(compare.key(), 64))

        def conv(i, o, k=3, stride=1):
            return eqx.nn.Conv(axes, i, o, k, stride, (k - 1) // 2, key=next(keys))

        return {
            "down": [[conv(shape[1], widths[0]), conv(widths[0], widths[0])]]
            + [[conv(i, o, 2, 2), conv(o, o), conv(o, o)] for i, o in pairs],
            "widen": [eqx.nn.ConvTranspose(axes, o, i, up, 2, padding=(up - 2) // 2, key=next(keys)) for i, o in pairs],
            "up": [[conv(2 * i, i), conv(i, i)] for i, _ in pairs],
            "out": conv(widths[0], shape[1], 1),
        }

    def restored(network, x, training):
        levels = []
        for layers in network["down"]:
            levels.append(x := run(layers, x))
        for level, widen, layers in reversed(list(zip(levels[:-1], network["widen"], network["up"], strict=True))):
            x = run(layers, jnp.concatenate([level, widen(x)]))
        return network["out"](x)

    x, _ = compare.images(*shape)
    return compare.of_equinox(network(), (x, x), restored, compare.squares)


def sizes(up, *of):
    return [(*size, up) for size in of]


PLANE = ((1, 3, 32, 32), (16, 32)), ((4, 3, 96, 96), (32, 64, 128, 256)), ((16, 3, 256, 256), (64, 128, 256, 512))
SPACE = ((1, 1, 8, 16, 16), (8, 16)), ((1, 1, 16, 48, 48), (16, 32, 64, 128)), ((2, 1, 64, 128, 128), (32, 64, 128, 256))
NETWORKS = [
    compare.Network("U-Net", "equinox", make, *sizes(4, *PLANE)),
    compare.Network("3-D U-Net", "equinox", make, *sizes(2, *SPACE)),
]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

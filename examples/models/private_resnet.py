"""DP-SGD's sum of clipped gradients of a WRN-10 with group norms (De et al., 2022), by `vmap` of `grad`, written in flax.linen.

pip install flax; python examples/models/private_resnet.py
"""

import compare
import jax
import jax.numpy as jnp


def make(count, pixels, widen, strides):
    from flax import linen as nn

    class WideResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(16, (3, 3))(x)
            for i, stride in enumerate(strides):
                channels = 16 * widen << i
                h = nn.relu(nn.GroupNorm(8)(x))
                y = nn.relu(nn.GroupNorm(8)(nn.Conv(channels, (3, 3), stride)(h)))
                x = nn.Conv(channels, (1, 1), stride)(h) + nn.Conv(channels, (3, 3))(y)
            return nn.Dense(10)(nn.relu(nn.GroupNorm(8)(x)).mean((1, 2)))

    made = compare.of_linen(WideResNet(), compare.images(count, pixels, pixels, 3, classes=10))

    def step(params, x, labels):
        losses, found = jax.vmap(lambda x, label: made.functions["step"](params, x[None], label[None]))(x, labels)
        norms = jnp.sqrt(sum(jnp.sum(g.reshape(count, -1) ** 2, 1) for g in jax.tree.leaves(found)))
        return losses.mean(), jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 1 / norms), g, 1), found)

    return made._replace(functions=made.functions | {"step": step})


NETWORKS = [compare.Network("DP-SGD, WRN-10-4", "flax", make, (2, 8, 1, (2,)), (16, 32, 4, (1, 2, 2)), (256, 32, 4, (1, 2, 2)))]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

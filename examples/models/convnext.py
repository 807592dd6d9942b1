"""ConvNeXt-T (Liu et al., 2022), written in flax.linen.   pip install flax; python examples/models/convnext.py"""

import compare


def make(depths, *batch):
    from flax import linen as nn

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Conv(96, (4, 4), (4, 4))(x))
            for stage, depth in enumerate(depths):
                channels = 96 << stage
                if stage:
                    x = nn.Conv(channels, (2, 2), (2, 2))(nn.LayerNorm()(x))
                for block in range(depth):
                    y = nn.LayerNorm()(nn.Conv(channels, (7, 7), feature_group_count=channels)(x))
                    y = nn.Dense(channels)(nn.gelu(nn.Dense(4 * channels)(y)))
                    x = x + self.param(f"scale {stage} {block}", nn.initializers.constant(0.1), (channels,)) * y
            return nn.Dense(compare.CLASSES)(nn.LayerNorm()(x.mean((1, 2))))

    return compare.of_linen(ConvNeXt(), compare.images(*batch, 3))


TINY = (3, 3, 9, 3)
NETWORKS = [compare.Network("ConvNeXt-T", "flax", make, ((1,), 2, 32, 32), (TINY, 4, 96, 96), (TINY, 64, 224, 224))]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

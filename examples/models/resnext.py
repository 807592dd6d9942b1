"""ResNeXt-50 of jaxonmodels, unchanged, in equinox.   pip install jaxonmodels; python examples/models/resnext.py"""

import compare
import jax


def make(*batch):
    from jaxonmodels.models import resnet

    network, state = resnet._resnext50_32x4d(jax.random.key(0), n_classes=compare.CLASSES)
    leaves, tree = jax.tree.flatten(state)

    def call(network, x, training):
        return network(x, tree.unflatten(compare.cast(leaves, x.dtype)), inference=not training)[0]

    return compare.of_equinox(network, compare.images(*batch), call)


SIZES = (2, 3, 32, 32), (4, 3, 64, 64), (64, 3, 224, 224)
NETWORKS = [compare.Network("ResNeXt-50", "jaxonmodels", make, *SIZES)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

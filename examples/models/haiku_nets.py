"""Networks of haiku, unchanged.   pip install dm-haiku; python examples/models/haiku_nets.py [--only MobileNetV1]"""

import compare


def make(name, *batch):
    import haiku as hk

    def network(x, training):
        return getattr(hk.nets, name)(num_classes=compare.CLASSES)(x, is_training=training)

    return compare.of_haiku(network, compare.images(*batch, 3))


def network(name, count):
    sizes = [(name, *batch) for batch in ((2, 32, 32), (count, 96, 96), (64, 224, 224))]
    return compare.Network(name, "dm-haiku", make, *sizes)


NETWORKS = [network("MobileNetV1", 8), network("ResNet50", 4)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

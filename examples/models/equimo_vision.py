"""Networks of equimo, unchanged, in equinox.   pip install equimo; python examples/models/equimo_vision.py [--only "IFormer-S"]"""

import importlib

import compare
import jax


def make(module, name, *batch):
    key = jax.random.key(0)
    network = getattr(importlib.import_module(f"equimo.vision.models.{module}"), name)(key=key, num_classes=compare.CLASSES)

    def call(network, x, training):
        return network(x, key=key, inference=not training)

    return compare.of_equinox(network, compare.images(*batch), call)


def network(title, *of):
    sizes = ((2, 3, 64, 64), (4, 3, 96, 96), (64, 3, 224, 224))
    return compare.Network(title, "equimo", make, *((*of, *batch) for batch in sizes))


NETWORKS = [
    network("ConvNeXtV2-Nano", "convnext", "convnextv2_nano"),
    network("IFormer-S", "iformer", "iformer_s"),
    network("ReduceFormer-B1", "reduceformer", "reduceformer_backbone_b1"),
    network("MobileNetV3Large", "mobilenet", "mobilenetv3_large"),
]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

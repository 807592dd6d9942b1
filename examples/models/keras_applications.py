"""Networks of keras.applications, unchanged.   pip install keras; python examples/models/keras_applications.py [--only Xception]"""

import os

import compare

os.environ["KERAS_BACKEND"] = "jax"


def make(name, *batch):
    import keras

    static = dict(weights=None, classes=compare.CLASSES, classifier_activation=None)
    network = getattr(keras.applications, name)(input_shape=(*batch[1:], 3), **static)
    params, state = ([v.value for v in of] for of in (network.trainable_variables, network.non_trainable_variables))

    def apply(params, x, training):
        return network.stateless_call(params, state, x, training=training)[0]

    return compare.model(apply, params, compare.images(*batch, 3))


def network(name, count):
    sizes = [(name, *batch) for batch in ((2, 32, 32), (count, 96, 96), (64, 224, 224))]
    return compare.Network(name, "keras", make, *sizes, float64=False)  # layers compute in float32, whatever their arguments are


NETWORKS = [network("MobileNetV3Small", 16), network("ConvNeXtTiny", 4), network("EfficientNetB0", 8), network("Xception", 4)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))

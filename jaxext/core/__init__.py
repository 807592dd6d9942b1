"""Forms: bilinear products declared by axis labels, and the JAX rules that follow from the labels."""

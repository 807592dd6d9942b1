"""What a product is, and every rule of JAX that follows from the labels of its axes."""

"""The implementation `xla`: lax's products, and rewrites of convolutions that are slow in lax."""

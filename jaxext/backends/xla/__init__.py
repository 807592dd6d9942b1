"""The implementation `xla`: lax's products, and rewrites of convolutions where lax is slow."""

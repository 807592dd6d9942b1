"""jaxext's bilinear operations, one file each, and the replacement of lax's products by them."""

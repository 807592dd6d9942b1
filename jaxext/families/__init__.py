"""The bilinear operations that jaxext brings, one file each, and how lax's products become them."""

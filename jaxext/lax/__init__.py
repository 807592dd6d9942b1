"""Replacement of lax's products by those of jaxext."""

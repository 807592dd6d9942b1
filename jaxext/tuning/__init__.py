"""Measures what could compute the products of a function (`tune`), and tells what would (`explain`)."""

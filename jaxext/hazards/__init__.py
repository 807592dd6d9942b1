"""The doctor: hazards of lax's own products, and what finds them in a program."""

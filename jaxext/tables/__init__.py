"""What was measured: its format, its file, and what of it holds for this device."""

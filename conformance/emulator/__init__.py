"""Claims about the PTX emulator."""

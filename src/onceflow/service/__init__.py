"""What keeps a driver alive, alone and seen."""

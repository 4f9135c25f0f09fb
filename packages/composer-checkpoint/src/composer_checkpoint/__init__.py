"""How training state is saved, moved and restored."""

"""Exchange of checkpoint files with object stores: upload, publish and fetch."""

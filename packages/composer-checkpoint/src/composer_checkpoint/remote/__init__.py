"""Exchange checkpoint files with object stores: upload, publish, fetch."""

"""The file formats of checkpoints, each with a reader and a writer."""

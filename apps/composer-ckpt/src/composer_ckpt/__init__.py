"""The `composer-ckpt` command, which inspects and converts checkpoints."""

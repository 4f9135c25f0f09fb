"""What is in this checkpoint, and turn it into that one: the `composer-ckpt` command."""

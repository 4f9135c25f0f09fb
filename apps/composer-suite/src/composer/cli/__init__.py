"""The commands: `composer.cli.launcher` starts training, `composer.cli.collect_env` describes this machine."""

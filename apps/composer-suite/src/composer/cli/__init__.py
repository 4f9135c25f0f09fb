"""Commands: `composer.cli.launcher` starts training, `composer.cli.collect_env` describes the environment."""

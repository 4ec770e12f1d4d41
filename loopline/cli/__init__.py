"""The `loopline` command: one module a subcommand. What needs torch is imported when its command runs."""

"""The one exception for what a user can cause by configuration. Raised by `config`, caught by the CLI."""


class ConfigError(ValueError):
    """A user's mistake in the configuration; one line: value, constraint, field to change."""

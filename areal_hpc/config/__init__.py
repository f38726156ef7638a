"""Configuration: `schema` holds the dataclasses, `load` reads YAML and overrides and checks them."""

from areal_hpc.config.load import ConfigError, load_config, save_config
from areal_hpc.config.schema import Config

__all__ = ["Config", "ConfigError", "load_config", "save_config"]

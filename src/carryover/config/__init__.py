"""The config: one YAML file (and overlays), checked against a schema before anything runs."""

from carryover.config.load import config_from_dict, load_config
from carryover.config.schema import GENERATED_DATASETS, Config
from carryover.config.stages import TRAINED_VARIANTS, VARIANTS

__all__ = [
    "GENERATED_DATASETS",
    "TRAINED_VARIANTS",
    "VARIANTS",
    "Config",
    "config_from_dict",
    "load_config",
]

"""verl's `ppo_trainer` configuration as a recipe: `python run.py import.verl=PATH`."""

from importers.verl.recipe import bring

__all__ = ["bring"]

"""The images of the bench: their recipes, how they are built, and a cache of finished ones."""

from scripts.rig.image.build import CACHE, build, cached, excluded
from scripts.rig.image.recipes import RECIPES, Generated, Recipe, Step

__all__ = ["CACHE", "RECIPES", "Generated", "Recipe", "Step", "build", "cached", "excluded"]

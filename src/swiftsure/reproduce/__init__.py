"""The paper's experiments, each from data to figure and table."""

from swiftsure.reproduce.calm_cnndm import calm_cnndm

__all__ = ["calm_cnndm"]

"""The paper's experiments, each from data to figure and table."""

from swiftsure.reproduce.bild import bild
from swiftsure.reproduce.calm import calm
from swiftsure.reproduce.calm_cnndm import calm_cnndm
from swiftsure.reproduce.diffusion import diffusion
from swiftsure.reproduce.image_classification import image_classification
from swiftsure.reproduce.segmentation import segmentation

__all__ = ["bild", "calm", "calm_cnndm", "diffusion", "image_classification", "segmentation"]

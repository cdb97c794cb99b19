"""Distributed training: decorators that make one group of all workers of a pool, as in `@sky.distributed.torch()`.

Each module owns one framework, and imports it on the nodes only.
"""

# The functions replace the modules of the same names in this package, so they are loaded at once. They are small.
from skyward_core.distributed.jax import jax as jax
from skyward_core.distributed.keras import keras as keras
from skyward_core.distributed.tensorflow import tensorflow as tensorflow
from skyward_core.distributed.torch import torch as torch
from skyward_core.distributed.transformers import transformers as transformers

__all__ = ["jax", "keras", "tensorflow", "torch", "transformers"]

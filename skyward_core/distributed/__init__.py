"""Distributed training: decorators that make one group of all workers of a pool, as in `@sky.distributed.torch()`."""

from skyward_core.distributed.frameworks import jax as jax
from skyward_core.distributed.frameworks import keras as keras
from skyward_core.distributed.frameworks import tensorflow as tensorflow
from skyward_core.distributed.frameworks import torch as torch
from skyward_core.distributed.frameworks import transformers as transformers

__all__ = ["jax", "keras", "tensorflow", "torch", "transformers"]

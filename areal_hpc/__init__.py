"""Fully asynchronous reinforcement learning of reasoning models on supercomputers."""

__version__ = "0.1.0"

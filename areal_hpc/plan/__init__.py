"""`areal-hpc plan`: what fits, how fast it will go, and how to split the nodes. Starts nothing.

shape (the model's sizes) -> memory (bytes per rank) and rates (seconds per token, from the
hardware or `calibrate`d from a measured run) -> simulate (discrete events) -> splits (every
division of the nodes) -> cli (tables). Imports no torch, MPI, HDF5 or vLLM at the top:
everything runs on a login node or a laptop.
"""

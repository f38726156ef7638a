"""The spool: trajectories in HDF5 shards on the shared filesystem."""

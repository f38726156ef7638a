"""MPI: the world of roles (`world`) and typed messages between ranks (`channel`)."""

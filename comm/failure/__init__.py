"""Failed ranks: an error that names the missing ranks, and a clean rendezvous after a restart."""

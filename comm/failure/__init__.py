"""Ranks that die: the error that names them, and the rendezvous of a restart."""

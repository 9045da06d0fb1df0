"""Muon: steps in the direction of the orthogonalised momentum."""

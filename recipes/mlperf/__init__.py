"""The log of a run for MLPerf Training, and the rules that it is held to."""

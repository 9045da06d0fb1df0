"""The log of a run for MLPerf Training, and the rules that its recipe must keep."""

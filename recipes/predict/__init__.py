"""What a run will do, before it runs: its schedule, and its speed on clusters of any size."""

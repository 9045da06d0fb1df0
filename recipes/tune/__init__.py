"""Settings found by measurement: the loss scale of FP16 and the all-reduce plan."""

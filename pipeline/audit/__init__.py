"""What `largebatch data check` finds in a data set."""

"""The command line: one file per command; a command imports what it needs when it runs."""

"""Hold the tables against what releases of packages say of themselves, without a GPU."""

"""Detection: the only code that asks the machine what it has."""

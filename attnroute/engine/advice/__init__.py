"""What other calls, versions and packages would change about a decision."""

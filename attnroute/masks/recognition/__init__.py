"""Dense masks that say the same as a structured one."""

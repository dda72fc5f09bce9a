"""Recognise dense masks that equal a mask object."""

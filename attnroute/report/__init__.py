"""Render decisions as text and JSON; no other code writes sentences about them."""

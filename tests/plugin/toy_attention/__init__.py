"""A backend for attnroute in a distribution of its own, from docs/writing-a-backend.md."""

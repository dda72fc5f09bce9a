"""The one form that every mask becomes before a kernel sees it."""

"""The only places that write sentences about decisions."""

"""The masks that users build, without torch."""

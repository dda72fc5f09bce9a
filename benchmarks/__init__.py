"""Scripts that measure on a GPU, what they found, and what is made of it; none of it is installed."""

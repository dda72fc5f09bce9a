"""From the tensors of a call to the kernel that runs it; `attention` holds the public functions."""

"""From the tensors of a call to the kernel that runs it; `attention` has the public functions."""

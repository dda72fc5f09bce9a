"""FlexAttention."""

"""The question as plain data: calls, hosts, policies, and what rules may ask about them."""

"""One thin module per backend. They trust the decision: no capability is checked here."""

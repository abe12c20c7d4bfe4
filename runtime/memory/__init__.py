"""How much memory running takes, and how much of it may be used: plans and decisions, nothing is allocated here."""

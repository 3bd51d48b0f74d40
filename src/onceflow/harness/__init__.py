"""`onceflow verify`: a job under faults, and a checker that trusts none of onceflow's readers."""

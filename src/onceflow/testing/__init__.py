"""What tests of onceflow, and of sinks for onceflow, are built with."""

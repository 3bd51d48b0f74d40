"""The application under the faults of `onceflow verify`, and some faults of its services."""

"""The application under the faults of `onceflow verify`, and some of its own."""

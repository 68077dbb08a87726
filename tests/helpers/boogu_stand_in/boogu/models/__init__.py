"""Stand-in for the package `boogu`, written for these tests; not its code."""

"""Examples that are run by the launch scripts and the tests."""

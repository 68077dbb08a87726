"""A model that is being trained, as the source of a publish."""
